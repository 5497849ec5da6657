"""Hands the policy's weights to the engines: through a folder, or from process to process with vLLM's own sender.

Every rank calls every method, since ZeRO-3 gathers on all of them; rank 0 alone sends and speaks to the orchestrator,
which pauses the engines, proves what they took and lets them go on. Knows neither HTTP nor training. vLLM is imported
only where weights are streamed.
"""

from __future__ import annotations

import base64
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch

from agentrl.config import EngineConfig
from agentrl.engine.checksum import Checksum
from agentrl.engine.vllm_server import LOOPBACK
from agentrl.errors import ConfigError, LearnerError, MissingDependencyError, boundary
from agentrl.supervision.serving import free_port
from agentrl.types import Probe, TransferInit, WeightsRef
from trainer.weights import folder as weights
from trainer.weights.source import WeightSource

log = logging.getLogger(__name__)
T = TypeVar("T")

FOLDER, STREAMED = ("safetensors", "reload"), ("gloo", "nccl", "ipc")
GRACE_S = 5.0  # after the orchestrator refused, a sender that is not stuck ends within this time


class Link(Protocol):
    """What a publisher asks of the orchestrator. Both raise LearnerError."""

    def open_transfer(self, init: TransferInit) -> None:
        """Returns once every engine has joined."""
        ...

    def publish(self, ref: WeightsRef) -> None:
        """Returns once every engine holds the weights and has proven it. Raises WeightsWanted too."""
        ...


class Publisher(Protocol):
    """One way for weights to travel. All methods are called on every rank."""

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Returns the bytes sent once every engine holds the present weights.

        Raises LearnerError; WeightsWanted when an engine was restarted meanwhile: `reopen`, and publish again.
        """
        ...

    def reopen(self) -> None:
        """An engine was restarted: connect anew before the next publication."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How and where to publish."""

    backend: str  # of engine.weight_transfer, never auto
    rank: int
    weights_dir: Path  # for the folder backends
    timeout_s: float  # of one whole publication, as the orchestrator may take it

    def __post_init__(self) -> None:
        if self.backend not in (*FOLDER, *STREAMED):
            raise ConfigError(f"--weight-transfer {self.backend}: must be one of {', '.join((*FOLDER, *STREAMED))}")


def publisher(transfer: Transfer, engine: EngineConfig, *, source: WeightSource, link: Link) -> Publisher:
    """The publisher of `transfer.backend`. Raises ConfigError for what cannot work, MissingDependencyError."""
    if transfer.backend in FOLDER:
        return FolderPublisher(transfer, source=source, link=link)
    if transfer.backend == "ipc":
        _check_ipc(engine, source)
    return StreamedPublisher(transfer, engine, source=source, link=link)


def _check_ipc(engine: EngineConfig, source: WeightSource) -> None:
    if source.is_split:
        raise ConfigError(
            "engine.weight_transfer=ipc shares the parameters' own memory, and learner.zero_stage=3 gives it back "
            "layer by layer: use nccl"
        )
    if (host := _engine_host(engine)) not in LOOPBACK:
        raise ConfigError(
            f"engine.weight_transfer=ipc makes vLLM unpickle what it is sent, and the engine is at {host}: use nccl, "
            "or let it listen on 127.0.0.1"
        )


class FolderPublisher:
    """`safetensors` and `reload`: a new folder a version, which the engine reads."""

    def __init__(self, transfer: Transfer, *, source: WeightSource, link: Link) -> None:
        self._transfer = transfer
        self._source = source
        self._link = link

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Write, then tell. Raises LearnerError."""
        if self._transfer.rank != 0:
            self._source.take_part()
            return self._source.num_bytes
        with boundary(LearnerError, f"writing weights of version {policy_version} to {self._transfer.weights_dir}"):
            ref = weights.publish(self._source, self._transfer.weights_dir, policy_version=policy_version, probe=probe)
        if self._transfer.backend == "reload":
            ref = replace(ref, checksum="")  # vLLM's own loader sums nothing
        self._link.publish(ref)
        return ref.num_bytes

    def reopen(self) -> None:
        """No connection to make."""

    def close(self) -> None:
        """None to close."""


class StreamedPublisher:
    """`gloo`, `nccl` and `ipc`: vLLM's own trainer-side engines, with the orchestrator in place of the server's routes.

    A first pass over the source makes the checksum, which must be known before the tensors travel.
    """

    def __init__(self, transfer: Transfer, engine: EngineConfig, *, source: WeightSource, link: Link) -> None:
        self._transfer = transfer
        self._config = engine
        self._source = source
        self._client = _SyncClient(link)
        self._engine: Any = None

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Connect where that is still to do, sum, send. Raises LearnerError."""
        if self._engine is None:
            self._engine = self._guarded("connecting to the engines", self._opened)
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
        self._guarded(f"sending weights of version {policy_version}", self._engine.send_weights)
        return checksum.num_bytes

    def reopen(self) -> None:
        """Close; the next publication connects anew."""
        self.close()

    def close(self) -> None:
        """Leave the group."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            within(engine.shutdown, GRACE_S, over=threading.Event())
        except TimeoutError as error:  # NCCL may wait for an engine that is dead
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

    def _guarded(self, what: str, action: Callable[[], T]) -> T:
        client = self._client
        with boundary(LearnerError, f"{what} ({self._transfer.backend})"):
            client.refusal = None
            try:
                return within(action, self._transfer.timeout_s, over=client.over)
            except TimeoutError as error:
                self._engine = None  # a thread hangs in it: not to be touched any more
                raise LearnerError(f"{what}: {client.refusal or error}") from error


class _SyncClient:
    """vLLM's `VLLMWeightSyncClient`, by way of the orchestrator: it starts and finishes the engines' updates itself."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.announced: WeightsRef | None = None
        self.refusal: BaseException | None = None
        self.over = threading.Event()
        """Set with a refusal: nobody will receive what is being sent."""

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
        """The orchestrator's task."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.announced is not None
        ref = replace(self.announced, update_info=json_safe(update_info))
        self._ask(lambda: self._link.publish(ref))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The orchestrator's task."""


def json_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """CUDA IPC handles as vLLM reads them from JSON: pickled, in base64. Anything else as it is; no None."""
    rest = {key: value for key, value in update_info.items() if value is not None and key != "ipc_handles"}
    if (handles := update_info.get("ipc_handles")) is None:
        return rest
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode("ascii")}


def within(action: Callable[[], T], timeout_s: float, *, over: threading.Event) -> T:
    """`action`'s result, or its error. Raises TimeoutError past the deadline, or soon after others set `over`.

    It runs in a thread that is then left to itself and does not keep the process: NCCL has no deadline of its own, and
    a sender whose receiver never comes waits for all of its own.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts out on the first
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


def _init_info(transfer: Transfer, engine: EngineConfig) -> Any:
    """vLLM's init info for this rank. Rank 0 of the group is the sender, then come the engine's workers."""
    from agentrl.engine.vllm.gloo_group import own_address
    from trainer.weights import gloo as gloo_trainer

    if transfer.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=transfer.rank)
    address, world_size = own_address(_engine_host(engine)), 1 + engine.tensor_parallel
    if transfer.backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(address, free_port(address), world_size, rank=transfer.rank)
    gloo_trainer.register()
    return gloo_trainer.GlooTrainerInitInfo(
        master_address=address, world_size=world_size, timeout_s=engine.update_timeout_s, rank=transfer.rank
    )


def _engine_host(engine: EngineConfig) -> str:
    return (urlsplit(engine.urls[0]).hostname or "") if engine.urls else engine.host
