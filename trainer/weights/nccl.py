"""The sending end of weight transfer backend `nccl`: vLLM's own, whose every wait ends when the engines fail.

vLLM's sender waits without a deadline for engines that do not join, and in broadcasts that nobody receives. Here all
meet at a watch store before NCCL starts, and a refusal aborts the communicator. Its counterpart in the engine is
agentrl.engine.vllm.device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import trainer_init, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from agentrl.engine.vllm.device import NCCLInitInfo
from agentrl.engine.vllm.gloo_group import SENDER
from agentrl.engine.vllm.watch import Watch
from trainer.weights.gloo import joined

BACKEND = "agentrl_nccl"


def register() -> None:
    """Register the backend with vLLM's trainer factory. Calling it twice is harmless."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, NCCLTrainerEngine)


@dataclass
class SenderInfo(NCCLTrainerInitInfo):  # type: ignore[misc]
    """vLLM's; `timeout_s` limits joining and each update.

    Example: `SenderInfo("10.0.0.5", 29500, 3, rank=0)` for two engines with one worker each.
    """

    backend: ClassVar[str] = BACKEND

    timeout_s: float = 300.0


class NCCLTrainerEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """vLLM's sender. Every failure of an engine raises at once and closes the group."""

    init_info_cls = SenderInfo
    client: Any
    _watch: Watch | None = None

    @classmethod
    def trainer_init(cls, init_info: SenderInfo, *, client: Any, source: Any = None) -> Self:
        """On the sender, return once all workers have joined. Raises what the client raises, or GroupError."""
        if source is None:
            raise ValueError("backend nccl needs a WeightSource")
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            packed=init_info.packed,
            packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            packed_num_buffers=init_info.packed_num_buffers,
        )
        if engine.is_sender:
            engine._join(init_info)
        return engine

    def _join(self, info: SenderInfo) -> None:
        watch = Watch.of_sender(info.master_address, world_size=info.world_size, timeout_s=info.timeout_s)
        theirs = NCCLInitInfo(
            master_address=info.master_address,
            master_port=info.master_port,
            rank_offset=SENDER + 1,
            world_size=info.world_size,
            packed=info.packed,
            packed_buffer_size_bytes=info.packed_buffer_size_bytes,
            packed_num_buffers=info.packed_num_buffers,
            watch_port=watch.port,
            timeout_s=info.timeout_s,
        )
        payload = worker_init_payload(theirs)
        self._watch = watch
        self.model_update_group = joined(
            watch, lambda: self.client.init_weight_transfer_engine(payload), lambda: trainer_init(info)
        )

    def send_weights(self) -> None:
        """Update all engines. Other ranks than the sender only take part in gathering. A failure closes the group."""
        if not self.is_sender:
            super().send_weights()
            return
        if self.model_update_group is None:
            raise RuntimeError("the group is closed: connect again")
        theirs = self.client
        self.client = client = _EndingClient(theirs, self.shutdown)
        try:
            super().send_weights()
        except BaseException as error:
            self.shutdown()
            raise client.refusal or error from error
        finally:
            self.client = theirs

    def shutdown(self) -> None:
        """Leave the group: call off what the engines wait for, and abort the communicator. May be called again, and
        while another thread sends."""
        if self._watch is not None:
            self._watch.call_off()
        super().shutdown()


class _EndingClient:
    """vLLM's client protocol; `end` is called as soon as the engines refuse an update, so that no broadcast waits."""

    def __init__(self, client: Any, end: Callable[[], None]) -> None:
        self._client = client
        self._end = end
        self.refusal: BaseException | None = None

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self._client.update_weights(update_info)
        except BaseException as error:
            self.refusal = error
            self._end()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(weight_version)
