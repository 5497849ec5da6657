"""Publishes the policy's weights to the engines: through a folder, or streamed from process to process.

Every rank calls every method, since ZeRO-3 gathers on all of them. Rank 0 alone sends, and talks to the orchestrator,
which pauses the engines, checks what they received and resumes them. Independent of HTTP and training.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from agentrl.config import EngineConfig
from agentrl.engine.base import is_delta
from agentrl.engine.placement import LOOPBACK
from agentrl.errors import ConfigError, LearnerError, WeightsWanted, boundary
from agentrl.types import Probe, WeightsRef
from trainer.weights import folder
from trainer.weights.delta import DeltaFolders
from trainer.weights.publisher import FOLDER, Link, Publisher, TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.streamed import StreamedPublisher, engine_hosts

log = logging.getLogger(__name__)

MAX_ANNOUNCEMENTS = 3
"""How often one folder is announced to engines that are restarted while they read it."""


def publisher(transfer: TransferSettings, engine: EngineConfig, *, source: WeightSource, link: Link) -> Publisher:
    """The publisher of `transfer.backend`. Raises ConfigError for a combination that cannot work."""
    if transfer.backend in FOLDER:
        return FolderPublisher(transfer, source=source, link=link, whole_every=engine.weight_delta or 1)
    if transfer.backend == "ipc":
        _check_ipc(engine, source)
    return StreamedPublisher(transfer, engine, source=source, link=link)


def _check_ipc(engine: EngineConfig, source: WeightSource) -> None:
    if source.is_split:
        raise ConfigError(
            "engine.weight_transfer=ipc shares the parameters' own memory, and learner.zero_stage=3 releases it "
            "layer by layer: use nccl"
        )
    if (host := engine_hosts(engine)[0]) not in LOOPBACK:
        raise ConfigError(
            f"engine.weight_transfer=ipc makes vLLM unpickle what it is sent, and the engine is at {host}: use nccl, "
            "or let it listen on 127.0.0.1"
        )


class FolderPublisher:
    """`safetensors` and `reload`: a new folder for each publication.

    The engines read it while the learner goes on: `publish` returns once it is written.

    Args:
        whole_every: above 1, only every n-th folder has all weights, and the others what changed (`safetensors`).
    """

    def __init__(self, transfer: TransferSettings, *, source: WeightSource, link: Link, whole_every: int = 1) -> None:
        self._transfer = transfer
        self._source = source
        self._link = link
        self._announcement: _Announcement | None = None
        is_first, has_deltas = transfer.rank == 0, whole_every > 1
        self._deltas = DeltaFolders(transfer.weights_dir, whole_every=whole_every) if is_first and has_deltas else None

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Write the folder, then announce it in a thread. Raises LearnerError."""
        self.proven()
        if self._transfer.rank != 0:
            self._source.take_part()
            return self._source.num_bytes
        with boundary(LearnerError, f"writing weights of version {policy_version} to {self._transfer.weights_dir}"):
            ref = self._written(policy_version, probe)
        if self._transfer.backend == "reload":
            ref = replace(ref, checksum="")  # vLLM's own loader computes no checksum
        self._announcement = _Announcement(self._link, ref, self._deltas)
        return ref.num_bytes

    def _written(self, policy_version: int, probe: Probe) -> WeightsRef:
        if self._deltas is not None:
            return self._deltas.publish(self._source, policy_version=policy_version, probe=probe)
        return folder.publish(self._source, self._transfer.weights_dir, policy_version=policy_version, probe=probe)

    def proven(self) -> float:
        """See Publisher. Raises what the orchestrator answered, or LearnerError past the deadline."""
        announcement, self._announcement = self._announcement, None
        return 0.0 if announcement is None else announcement.result(timeout_s=self._transfer.timeout_s)

    def reopen(self) -> None:
        """Make the next publication whole. There is no connection."""
        if self._deltas is not None:
            self._deltas.forget()

    def close(self) -> None:
        """Leave an announcement that is under way alone: it has a deadline."""
        self._announcement = None


class _Announcement:
    """Tells the orchestrator of one folder, in a daemon thread, whose request has a deadline of its own.

    Where the engines want all weights instead of changes, it writes them with `deltas`, which nobody else uses
    meanwhile.
    """

    def __init__(self, link: Link, ref: WeightsRef, deltas: DeltaFolders | None) -> None:
        self._ref = ref
        self._deltas = deltas
        self._began = self._ended = time.monotonic()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._announce, args=(link,), daemon=True, name="announcement")
        self._thread.start()

    def _announce(self, link: Link) -> None:
        try:
            for _ in range(MAX_ANNOUNCEMENTS - 1):
                try:
                    return link.publish(self._ref)
                except WeightsWanted as error:
                    if is_delta(self._ref) and self._deltas is not None:
                        log.warning("%s: publishing all weights", error)
                        self._ref = self._deltas.whole_again()
                    else:
                        log.warning("%s: announcing its folder again", error)
            link.publish(self._ref)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.monotonic()

    def result(self, *, timeout_s: float) -> float:
        """Seconds from the announcement to the engines' proof. Raises the error."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            version = self._ref.policy_version
            raise LearnerError(f"weights of version {version}: the engines did not take them within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._ended - self._began
