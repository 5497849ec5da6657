"""Streams weights from process to process, with the trainer side of vLLM's weight transfer.

vLLM's trainer engines send; the orchestrator takes the place of the server's routes: it pauses the engines, starts and
finishes their updates and checks the result. vLLM is imported only here.
"""

from __future__ import annotations

import base64
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from agentrl.config import EngineConfig
from agentrl.engine.checksum import Checksum
from agentrl.errors import LearnerError, MissingDependencyError, boundary
from agentrl.supervision.serving import free_port
from agentrl.types import Probe, TransferInit, WeightsRef
from trainer.weights.publisher import Link, TransferSettings
from trainer.weights.source import WeightSource

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 5.0  # after the orchestrator refused, a sender that is not stuck ends within this time


class StreamedPublisher:
    """`gloo`, `nccl` and `ipc`. Connects at the first publication.

    Iterates over the source twice: the checksum must be known before the tensors are sent.
    """

    def __init__(self, transfer: TransferSettings, engine: EngineConfig, *, source: WeightSource, link: Link) -> None:
        self._transfer = transfer
        self._config = engine
        self._source = source
        self._client = _SyncClient(link)
        self._engine: Any = None

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Connect if necessary, compute the checksum, send. Raises LearnerError."""
        if self._engine is None:
            self._engine = self._within_deadline("connecting to the engines", self._opened)
        checksum = Checksum()
        for name, tensor in self._source:
            checksum.add(name, tensor)
        self._client.announced = WeightsRef(
            policy_version=policy_version,
            num_bytes=checksum.num_bytes,
            update_info={},
            checksum=checksum.hexdigest(),
            probe=probe,
        )
        self._within_deadline(f"sending weights of version {policy_version}", self._engine.send_weights)
        return checksum.num_bytes

    def reopen(self) -> None:
        """Close the connections; the next publication connects again."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            within(engine.shutdown, GRACE_S, over=threading.Event())
        except TimeoutError as error:  # NCCL may wait for an engine that died
            log.warning("closing the connection to the engines: %s", error)

    def _opened(self) -> Any:
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        except ImportError as error:
            raise MissingDependencyError(
                f"--weight-transfer {self._transfer.backend} needs vLLM where the learner runs: {error}"
            ) from error
        init_info = _init_info(self._transfer, self._config)
        return WeightTransferTrainerFactory.trainer_init(init_info, client=self._client, source=self._source)

    def _within_deadline(self, what: str, action: Callable[[], T]) -> T:
        """The action's result. Raises LearnerError, also past the deadline, with the orchestrator's refusal if any."""
        client = self._client
        with boundary(LearnerError, f"{what} ({self._transfer.backend})"):
            client.refusal = None
            try:
                return within(action, self._transfer.timeout_s, over=client.over)
            except TimeoutError as error:
                self._engine = None  # a thread hangs in it: do not use it again
                raise LearnerError(f"{what}: {client.refusal or error}") from error


class _SyncClient:
    """vLLM's `VLLMWeightSyncClient`, which forwards to the orchestrator."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.announced: WeightsRef | None = None
        self.refusal: BaseException | None = None
        self.over = threading.Event()
        """Set after a refusal: no engine will receive what is being sent."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask(lambda: self._link.open_transfer(TransferInit(init_info=init_info)))

    def _ask(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self.refusal = error
            self.over.set()
            raise

    def start_weight_update(self) -> None:
        """No-op: the orchestrator does it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.announced is not None
        ref = replace(self.announced, update_info=json_safe(update_info))
        self._ask(lambda: self._link.publish(ref))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """No-op: the orchestrator does it."""


def json_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """The update info for JSON: CUDA IPC handles are pickled in base64, as vLLM reads them; None is dropped."""
    rest = {key: value for key, value in update_info.items() if value is not None and key != "ipc_handles"}
    if (handles := update_info.get("ipc_handles")) is None:
        return rest
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode("ascii")}


def within(action: Callable[[], T], timeout_s: float, *, over: threading.Event) -> T:
    """The result of `action`, or its error. Raises TimeoutError past the deadline, or `GRACE_S` after `over` is set.

    `action` runs in a daemon thread, which is abandoned then: NCCL has no deadline of its own, and a sender whose
    receiver never connects waits forever.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread uses the first device
            results.append(action())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    over.clear()
    thread = threading.Thread(target=run, daemon=True, name="weight transfer")
    thread.start()
    over.wait(timeout_s)
    thread.join(GRACE_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"not done within {timeout_s:g} s")
    return results[0]


def _init_info(transfer: TransferSettings, engine: EngineConfig) -> Any:
    """vLLM's init info for this rank. Rank 0 of the group is the sender; the engine's workers follow."""
    from agentrl.engine.vllm.gloo_group import own_address
    from trainer.weights import gloo

    if transfer.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=transfer.rank)
    address, world_size = own_address(engine_host(engine)), 1 + engine.tensor_parallel
    if transfer.backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(address, free_port(address), world_size, rank=transfer.rank)
    gloo.register()
    return gloo.GlooTrainerInitInfo(
        master_address=address, world_size=world_size, timeout_s=engine.update_timeout_s, rank=transfer.rank
    )


def engine_host(engine: EngineConfig) -> str:
    """Host of the first engine, as the learner reaches it."""
    return (urlsplit(engine.urls[0]).hostname or "") if engine.urls else engine.host
