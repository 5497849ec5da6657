"""The sending end of weight transfer backend `gloo`, for vLLM's trainer factory. Independent of models and HTTP.

Its counterpart in the engine is agentrl.engine.vllm.gloo, which describes the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from agentrl.engine.vllm.gloo import GlooInitInfo, GlooUpdateInfo
from agentrl.engine.vllm.gloo_group import SENDER, Deadline, Group, GroupError, listen
from agentrl.engine.vllm.watch import Watch

T = TypeVar("T")

BACKEND = "gloo"


def register() -> None:
    """Register the backend with vLLM's trainer factory. Calling it twice is harmless."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerEngine)


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """How the sender listens. `master_address` is its own address as the engines see it; `timeout_s` limits joining and
    each update.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int = 0  # 0: any free port
    world_size: int  # the sender and all workers of all engines
    timeout_s: float


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):  # type: ignore[misc]
    """Sends the source's tensors while the request to the engines runs in a thread. Every failure raises at once."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, init_info: GlooTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout_s = init_info.timeout_s
        self._group: Group | None = None

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """On the sender, return once all workers have joined. Raises what the client raises, or GroupError."""
        if source is None:
            raise ValueError("backend gloo needs a WeightSource")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._join(init_info)
        return engine

    def _join(self, info: GlooTrainerInitInfo) -> None:
        address, world_size, timeout_s = info.master_address, info.world_size, info.timeout_s
        store = listen(address, info.master_port, world_size=world_size, timeout_s=timeout_s)
        watch = Watch(store, world_size=world_size, timeout_s=timeout_s, is_sender=True)
        theirs = GlooInitInfo(
            master_address=address,
            master_port=store.port,
            rank_offset=SENDER + 1,
            world_size=world_size,
            timeout_s=timeout_s,
        )

        def join() -> Group:
            return Group(store, rank=SENDER, world_size=world_size, address=address, timeout_s=timeout_s)

        self._group = joined(watch, lambda: self.client.init_weight_transfer_engine(asdict(theirs)), join)

    def send_weights(self) -> None:
        """Update all engines. Other ranks than the sender only take part in gathering. A failure closes the group."""
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        if self._group is None:
            raise RuntimeError("the group is closed: connect again")
        update = GlooUpdateInfo(
            names=[meta.name for meta in metadata],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metadata],
            shapes=[list(meta.shape) for meta in metadata],
        )
        self.client.start_weight_update()
        try:
            alongside(lambda: self.client.update_weights(asdict(update)), self._broadcast)
        except BaseException:
            self.shutdown()
            raise
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        group, deadline = self._group, Deadline(self._timeout_s)
        assert group is not None
        try:
            for _, tensor in self.source:
                group.broadcast(tensor.cpu().contiguous(), deadline)
        except BaseException:
            group.close()
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def joined(watch: Watch, call: Callable[[], None], join: Callable[[], T]) -> T:
    """The result of `join`, once all receivers have come. `call` makes them come; where it fails, nobody waits on."""

    def come() -> None:
        try:
            call()
        except BaseException:
            watch.call_off()
            raise

    def meet() -> T:
        watch.meet()
        return join()

    return alongside(come, meet)


def alongside(theirs: Callable[[], None], ours: Callable[[], T]) -> T:
    """Run both at the same time, `theirs` in a thread. Returns the result of `ours` once both are done.

    `theirs` must have a deadline. If it failed too, its error is raised in place of a broken connection, since the
    engine's own message says more.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight transfer call")
    call = executor.submit(theirs)
    try:
        result = ours()
        call.result()
        return result
    except GroupError as error:
        raise call.exception() or error from error
    finally:
        executor.shutdown(wait=False)
