"""The sending end of backend `gloo`, as vLLM's trainer factory wants it. Knows no models; HTTP is its client's matter.

The counterpart of agentrl.engine.vllm.gloo; what travels is said there.
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

T = TypeVar("T")

BACKEND = "gloo"


def register() -> None:
    """Make the backend known to vLLM's trainer factory; again is harmless."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerEngine)


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """`master_address`: the sender's own, towards the engines. `timeout_s`: of the joining, and of one update."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int = 0  # 0: any that is free
    world_size: int  # the sender and all workers of all engines
    timeout_s: float


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):  # type: ignore[misc]
    """Sends each tensor of the source while the engines' own call runs beside it. Every failure raises at once."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, init_info: GlooTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout_s = init_info.timeout_s
        self._group: Group | None = None

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Wait, on the sender, until all workers have joined. Raises what the client raises, or GroupError."""
        if source is None:
            raise ValueError("backend gloo needs a WeightSource")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._join(init_info)
        return engine

    def _join(self, info: GlooTrainerInitInfo) -> None:
        address, world_size, timeout_s = info.master_address, info.world_size, info.timeout_s
        store = listen(address, info.master_port, world_size=world_size, timeout_s=timeout_s)
        theirs = GlooInitInfo(
            master_address=address,
            master_port=store.port,
            rank_offset=SENDER + 1,
            world_size=world_size,
            timeout_s=timeout_s,
        )

        def join() -> Group:
            return Group(store, rank=SENDER, world_size=world_size, address=address, timeout_s=timeout_s)

        self._group = _beside(lambda: self.client.init_weight_transfer_engine(asdict(theirs)), join)

    def send_weights(self) -> None:
        """One update of all engines; other ranks take part in the source's gathers. A failure closes the group."""
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        if self._group is None:
            raise RuntimeError("the group is closed: connect anew")
        update = GlooUpdateInfo(
            names=[meta.name for meta in metadata],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metadata],
            shapes=[list(meta.shape) for meta in metadata],
        )
        self.client.start_weight_update()
        try:
            _beside(lambda: self.client.update_weights(asdict(update)), self._broadcast)
        except BaseException:
            self.shutdown()
            raise
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        group, deadline = self._group, Deadline(self._timeout_s)
        assert group is not None
        pairs = iter(self.source)
        try:
            for _, tensor in pairs:
                group.broadcast(tensor.cpu().contiguous(), deadline)
        except BaseException:
            group.close()
            for _ in pairs:
                pass  # the other ranks are in the same pass
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _beside(theirs: Callable[[], None], ours: Callable[[], T]) -> T:
    """Run both at the same time, `theirs` in a thread; return ours once both are done.

    `theirs` must have a deadline. Where it failed too it is raised in place of a broken connection: an engine's own
    words say more.
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
