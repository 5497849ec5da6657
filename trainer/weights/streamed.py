"""Streams weights from process to process, with the trainer side of vLLM's weight transfer.

vLLM's trainer engines send; the orchestrator takes the place of the server's routes: it pauses the engines, starts and
finishes their updates and checks the result. vLLM is imported only here.
"""

from __future__ import annotations

import base64
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agentrl.config import EngineConfig
from agentrl.engine.checksum import Checksum
from agentrl.engine.placement import LOOPBACK
from agentrl.errors import LearnerError, MissingDependencyError, WeightsWanted, boundary
from agentrl.supervision.serving import free_port
from agentrl.types import Probe, TransferInit, WeightsRef
from trainer import ranks
from trainer.weights.publisher import Link, TransferSettings
from trainer.weights.source import TensorMeta, WeightSource

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 5.0
"""After a refusal, or past the deadline, a sender that is not stuck ends within this time."""
ABORT_S = 60.0
"""A stuck sender ends within this time after its connections were cut. It may have layers to gather with other ranks.
"""
EXIT_HUNG = 75
"""Exit code of a learner whose sender could not be ended: EX_TEMPFAIL, the supervisor starts it again."""


class StreamedPublisher:
    """`gloo`, `nccl` and `ipc`. Connects at the first publication.

    Iterates over the source twice: the checksum must be known before the tensors are sent.

    A sender whose receiver died waits forever: NCCL has no deadline of its own. After the orchestrator's refusal, and
    past the deadline, the connections are cut (for NCCL this is ncclCommAbort), which ends it.
    """

    def __init__(self, transfer: TransferSettings, engine: EngineConfig, *, source: WeightSource, link: Link) -> None:
        self._transfer = transfer
        self._config = engine
        self._source = _FinishedSource(source)
        self._client = _SyncClient(link)
        self._engine: Any = None
        self._receivers: tuple[str, ...] = ()  # of the open group

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Connect if necessary, compute the checksum, send. Raises LearnerError, WeightsWanted."""
        is_sender = self._transfer.rank == 0
        try:
            if is_sender:
                self._choose_receivers(policy_version)
            if self._engine is None and (self._receivers or not is_sender):
                self._engine = self._within_deadline("connecting to the engines", self._opened)
        except WeightsWanted:
            self._take_part(num_passes=2)
            raise
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
        if is_sender and not self._receivers:  # all took them before the transfer broke off
            self._take_part(num_passes=1)
            self._client.update_weights({})
        else:
            self._within_deadline(f"sending weights of version {policy_version}", self._sent)
        return checksum.num_bytes

    def _choose_receivers(self, policy_version: int) -> None:
        """Ask who takes the weights. The group is made anew when an engine has left it or has to join it."""
        receivers = self._client.receivers(policy_version)
        if receivers != self._receivers:
            self.close()
            self._receivers = receivers

    def _take_part(self, *, num_passes: int) -> None:
        """Gather with the other ranks, which do so for the checksum and for the sending."""
        if self._source.is_split:
            for _ in range(num_passes):
                for _ in self._source:
                    pass

    def proven(self) -> float:
        """At once: `publish` waits for the proof, since the weights must not change while they are sent."""
        return 0.0

    def reopen(self) -> None:
        """Close the connections; the next publication connects again."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        engine, self._engine = self._engine, None
        if engine is not None:
            _cut(engine)

    def _opened(self) -> Any:
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        except ImportError as error:
            raise MissingDependencyError(
                f"--weight-transfer {self._transfer.backend} needs vLLM where the learner runs: {error}"
            ) from error
        init_info = _init_info(self._transfer, self._config, num_engines=len(self._receivers))
        return WeightTransferTrainerFactory.trainer_init(init_info, client=self._client, source=self._source)

    def _sent(self) -> None:
        self._source.begin_pass()
        try:
            self._engine.send_weights()
        except BaseException:
            if self._source.is_split:
                self._source.finish_pass()
            if self._transfer.backend == "ipc" and self._client.refusal is not None:
                ranks.barrier()  # where the other ranks wait for the end of the sending
            raise

    def _within_deadline(self, what: str, action: Callable[[], T]) -> T:
        """The action's result. After a failure the engine is closed.

        Raises WeightsWanted, if that is the orchestrator's answer, or LearnerError.
        """
        client = self._client
        client.refusal, client.over = None, threading.Event()  # a thread that was left alone sets its own
        with boundary(LearnerError, f"{what} ({self._transfer.backend})"):
            try:
                abort = self.close if self._can_be_aborted() else None
                return within(action, self._transfer.timeout_s, over=client.over, abort=abort)
            except BaseException as error:
                self.close()
                if isinstance(error, StuckError):
                    self._end_if_gpu_is_lost(f"{what}: {error}")
                if not isinstance(error, TimeoutError):
                    # The sender sees a broken connection before the orchestrator knows what became of the engine.
                    client.idle.wait(self._transfer.timeout_s)
                if isinstance(client.refusal, WeightsWanted):
                    raise client.refusal from error
                if isinstance(error, TimeoutError):
                    raise LearnerError(f"{what}: {client.refusal or error}") from error
                raise

    def _can_be_aborted(self) -> bool:
        """Whether to cut the connections and wait for the sender's end. Over gloo it ends at its own deadline, so that
        waiting is of use only where other ranks gather with it."""
        return self._engine is not None and (self._transfer.backend != "gloo" or self._source.is_split)

    def _end_if_gpu_is_lost(self, why: str) -> None:
        """End the process where a kernel that cannot be ended occupies its GPU, since any further call may hang, an
        orderly exit included; or where other ranks gather with the thread that hangs. Else leave the thread alone."""
        if (torch.cuda.is_available() and self._transfer.backend != "gloo") or self._source.is_split:
            end_process(why)


def end_process(why: str) -> None:
    """End this process at once, without any cleanup, which could hang. The supervisor starts the learner again."""
    sys.stderr.write(f"learner: LearnerError: {why}; this process cannot end in an orderly way and is ended\n")
    sys.stderr.flush()
    os._exit(EXIT_HUNG)


class _FinishedSource:
    """A `WeightSource` whose last pass can be finished after a failure: the other ranks gather with us to its end."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._pass: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> list[TensorMeta]:
        """See WeightSource."""
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._pass = iter(self._source)
        return self._pass

    @property
    def is_split(self) -> bool:
        """See WeightSource."""
        return self._source.is_split

    def begin_pass(self) -> None:
        """From now on `finish_pass` means a new pass, even if nobody iterates."""
        self._pass = iter(self._source)

    def finish_pass(self) -> None:
        """Take what is left of the last pass, and drop it."""
        for _ in self._pass:
            pass


class _SyncClient:
    """vLLM's `VLLMWeightSyncClient`, which forwards to the orchestrator."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.announced: WeightsRef | None = None
        self.refusal: BaseException | None = None
        self.over = threading.Event()
        """Set after a refusal: no engine will receive what is being sent."""
        self.idle = threading.Event()
        """Cleared while the orchestrator is being asked. Its answer has a deadline."""
        self.idle.set()

    def receivers(self, policy_version: int) -> tuple[str, ...]:
        """The engines that will take this version."""
        return self._link.receivers(policy_version).engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask(lambda: self._link.open_transfer(TransferInit(init_info=init_info)))

    def _ask(self, call: Callable[[], None]) -> None:
        self.idle.clear()
        try:
            call()
        except BaseException as error:
            self.refusal = error
            self.over.set()
            raise
        finally:
            self.idle.set()

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


class StuckError(TimeoutError):
    """An action did not end although its connections were cut. Its thread is still there."""


def within(
    action: Callable[[], T], timeout_s: float, *, over: threading.Event, abort: Callable[[], None] | None = None
) -> T:
    """The result of `action`, or its error. Raises TimeoutError past the deadline, or `GRACE_S` after `over` is set.

    `action` runs in a daemon thread. When it is late, `abort` is called, which should end it within `ABORT_S`; without
    one, or if it does not help (StuckError), the thread is abandoned.
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
    if thread.is_alive():
        if abort is not None:
            abort()
            thread.join(ABORT_S)
            if thread.is_alive():
                raise StuckError(f"not done within {timeout_s:g} s, and it hangs")
        raise TimeoutError(f"not done within {timeout_s:g} s") from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    return results[0]


def _cut(engine: Any) -> None:
    """Close the sender's connections, in a thread, since NCCL may wait for an engine that died."""
    try:
        within(engine.shutdown, GRACE_S, over=threading.Event())
    except Exception as error:
        log.warning("closing the connection to the engines: %s", error)


def _init_info(transfer: TransferSettings, engine: EngineConfig, *, num_engines: int) -> Any:
    """vLLM's init info for this rank. Rank 0 of the group is the sender; the workers of all engines follow."""
    if transfer.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=transfer.rank)
    address, world_size = _address(engine), 1 + num_engines * engine.tensor_parallel
    if transfer.backend == "nccl":
        from trainer.weights import nccl

        nccl.register()
        return nccl.SenderInfo(
            address, free_port(address), world_size, rank=transfer.rank, timeout_s=engine.update_timeout_s
        )
    from trainer.weights import gloo

    gloo.register()
    return gloo.GlooTrainerInitInfo(
        master_address=address, world_size=world_size, timeout_s=engine.update_timeout_s, rank=transfer.rank
    )


def _address(engine: EngineConfig) -> str:
    """This machine's address as every engine reaches it: loopback only where all of them are here."""
    from agentrl.engine.vllm.gloo_group import own_address

    addresses = [own_address(host) for host in engine_hosts(engine)]
    return next((address for address in addresses if address not in LOOPBACK), addresses[0])


def engine_hosts(engine: EngineConfig) -> list[str]:
    """Host of each engine, as the learner reaches it."""
    return [urlsplit(url).hostname or "" for url in engine.urls] or [engine.host]
