"""vLLM's own NCCL and CUDA IPC backends, which here also refuse other models, compute a checksum and renew tied layers.

vLLM's transport is unchanged. Unlike our own backends these load while they receive: an update that fails in the middle
leaves a mix of weights. Then the checksum is empty, and the engine must not serve before a complete update.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from agentrl.engine.vllm import loading as vllm_loading
from agentrl.engine.vllm.watch import Watch


class _Proven:
    """Mixin that comes before vLLM's engine class.

    vLLM moves every layer to the meta device when an update starts, and an engine in that state ends at its next
    forward pass. Here the layers move only after the names and shapes have been checked.
    """

    supports_draft_weight_update = False
    device: Any
    model: Any
    model_config: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.expected = vllm_loading.Expected(self.model, self.model_config)
        self.checksum = ""
        self._arrived = ""
        self._has_moved = False  # layers are on the meta device, or wait for their last tensors

    def start_weight_update(self) -> None:
        """Move nothing yet: `receive_weights` does after its check."""
        self._arrived = ""

    def receive_weights(self, update_info: Any) -> None:
        """vLLM's own, with a checksum. Raises ValueError for another model's names or shapes; then nothing has moved.

        After any other error the checksum is empty until a complete update.
        """
        offered = {name: tuple(shape) for name, shape in zip(update_info.names, update_info.shapes, strict=True)}
        self.expected.check(offered, "the learner's update")
        self.checksum = ""
        if self._has_moved:
            super().finish_weight_update()  # type: ignore[misc]  # an update broke: vLLM would count its tensors again
        self._has_moved = True
        super().start_weight_update()  # type: ignore[misc]
        model, loading = self.model, vllm_loading.LoadingModel(self.model, self.device)
        self.model = loading
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model
        self._arrived = loading.checksum.hexdigest()

    def finish_weight_update(self) -> None:
        """vLLM's own; then tied layers are renewed. Raises ValueError when no weights have arrived since the start."""
        if not self._arrived:
            raise ValueError("nothing was received between start_weight_update and finish_weight_update")
        super().finish_weight_update()  # type: ignore[misc]
        self._has_moved = False
        self.expected.renew_tied_layers(self.model)
        self.checksum, self._arrived = self._arrived, ""


@dataclass(kw_only=True)
class NCCLInitInfo(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's, and the port of the sender's watch store; `timeout_s` limits joining and each update.

    Example: `NCCLInitInfo(master_address="10.0.0.5", master_port=29500, rank_offset=1, world_size=3, watch_port=29501)`
    """

    watch_port: int
    timeout_s: float = 300.0


class NCCLEngine(_Proven, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Backend `agentrl_nccl`. NCCL has no deadlines; here joining and each update have one.

    A sender that is gone, or that calls the update off, ends it at once: the communicator is aborted.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "agentrl_nccl"}'`.
    """

    init_info_cls = NCCLInitInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._watch: Watch | None = None

    def init_transfer_engine(self, init_info: NCCLInitInfo) -> None:
        """Join the sender's group, instead of an earlier one. Raises GroupError past the deadline."""
        self.shutdown()
        address, timeout_s = init_info.master_address, init_info.timeout_s
        watch = Watch.of_receiver(address, init_info.watch_port, world_size=init_info.world_size, timeout_s=timeout_s)
        watch.meet()  # NCCL would wait forever for one that does not come
        joining = copy.copy(self)  # an abandoned thread must not change this engine later
        watch.joined(lambda: super(NCCLEngine, joining).init_transfer_engine(init_info), self.device)
        self.__dict__.update(vars(joining))
        self._watch = watch

    def receive_weights(self, update_info: Any) -> None:
        """See `_Proven.receive_weights`. Raises GroupError when the sender is gone, too slow, or has called it off."""
        if self._watch is None:
            raise RuntimeError("there is no connection to the learner: call init_weight_transfer_engine first")
        try:
            with self._watch.guard(self.model_update_group.destroy):
                super().receive_weights(update_info)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        self._watch = None


class IPCEngine(_Proven, IPCWeightTransferEngine):  # type: ignore[misc]
    """Backend `agentrl_ipc`.

    Example: `vllm serve MODEL --weight-transfer-config '{"backend": "agentrl_ipc"}'`.
    """
