"""A weight-transfer backend inside vLLM that receives over gloo: vLLM's NCCL backend, for machines without a GPU.

The protocol is that of vLLM's NCCL backend without packing: names, dtypes and shapes in the update, then one broadcast
per tensor from rank 0. Independent of versions, HTTP and training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from agentrl.engine.vllm import gloo_group, loading
from agentrl.engine.vllm.watch import Watch


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The address of the sender, and the ranks of the workers. `timeout_s` limits joining and each update.

    Example: `GlooInitInfo("10.0.0.5", 29500, rank_offset=1, world_size=2, timeout_s=60.0)`.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of an update, in the order in which they are sent.

    Example: `GlooUpdateInfo(names=["lm_head.weight"], dtype_names=["float32"], shapes=[[384, 64]])`.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must have the same length")


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """Receives into host memory, and changes the model only at the end of the update.

    So a sender that dies or is too slow leaves the old weights complete. Any failure closes the group, so that the
    sender notices at once; the next update needs a new `init_transfer_engine`.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "gloo"}'`.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected = loading.Expected(self.model, self.model_config)
        self.checksum = ""
        self._group: gloo_group.Group | None = None
        self._timeout_s = 0.0
        self._received: dict[str, Tensor] = {}

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group, instead of an earlier one. Raises GroupError past the deadline."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout_s, world_size = init_info.timeout_s, init_info.world_size
        store = gloo_group.meet(
            init_info.master_address, init_info.master_port, world_size=world_size, timeout_s=timeout_s
        )
        Watch(store, world_size=world_size, timeout_s=timeout_s, is_sender=False).meet()
        address = gloo_group.own_address(init_info.master_address)
        self._group = gloo_group.Group(store, rank=rank, world_size=world_size, address=address, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    def start_weight_update(self) -> None:
        """Drop what an interrupted update had brought."""
        self._received.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `receive_weights`. The base class synchronises an accelerator, which a CPU does not have."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._received.clear()
            self.shutdown()
            raise

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive all tensors into host memory.

        Raises ValueError for another model's names or shapes, GroupError when the sender is gone or too slow.
        """
        if self._group is None:
            raise RuntimeError("there is no connection to the learner: call init_weight_transfer_engine first")
        offered = {name: tuple(shape) for name, shape in zip(update_info.names, update_info.shapes, strict=True)}
        self.expected.check(offered, "the learner's update")
        deadline = gloo_group.Deadline(self._timeout_s)
        for (name, shape), dtype_name in zip(offered.items(), update_info.dtype_names, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name), device="cpu")
            self._group.broadcast(tensor, deadline)
            self._received[name] = tensor

    def finish_weight_update(self) -> None:
        """Load the received tensors. Raises ValueError when there are none."""
        if not self._received:
            raise ValueError("nothing was received between start_weight_update and finish_weight_update")
        loading.load(self, self.expected, self._received.items())
        self._received.clear()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None
