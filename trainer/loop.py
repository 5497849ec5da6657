"""The learner process's loop: publish weights, fetch a batch, step, report.

Rank 0 alone talks to the orchestrator and shares its answers with the other ranks. Independent of models and
objectives.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentrl.config import Config, LearnerConfig
from agentrl.config.engine import Transfer
from agentrl.engine.vllm_server import publication_timeout_s
from agentrl.errors import LearnerError, WeightsWanted
from agentrl.report import learner_notes
from agentrl.run_folder import RunFolder
from agentrl.training.model_folder import Origin
from agentrl.types import Batch, Probe
from trainer import checkpoint, ranks
from trainer.gpu_memory import GpuShare
from trainer.learner import Learner
from trainer.orchestrator_client import NoBatch, OrchestratorClient
from trainer.weights import folder
from trainer.weights.publisher import Publisher, TransferSettings
from trainer.weights.source import WeightSource
from trainer.weights.transfer import publisher

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_TOKENS = 64
RANKS_SLACK_S = 120.0
"""How much longer than one publication ranks wait for each other: its last seconds go into aborting it."""


def run(
    config: Config,
    *,
    orchestrator_url: str,
    token: str,
    weights_dir: Path,
    run_dir: Path,
    weight_transfer: Transfer,
    shares_gpu: bool = False,
    resume: Path | None = None,
) -> None:
    """Train until the orchestrator says that the run is over, then export to `run_dir/checkpoints/final`.

    Args:
        weight_transfer: how weights reach the engines: `engine.weight_transfer`, resolved.
        shares_gpu: an engine uses the GPU of a rank.
        resume: a checkpoint, or a folder of them, to continue from; the orchestrator must be at its version.

    Raises LearnerError, StaleTrajectoryError or ConfigError; the calling process should then end with an error.
    """
    timeout_s = publication_timeout_s(config.engine)
    # The other ranks wait in a collective while the first one publishes.
    ranks.join(timeout_s=max(config.learner.step_timeout_s, timeout_s + RANKS_SLACK_S))
    torch.set_num_threads(_num_threads(config.learner))
    share = GpuShare(config.engine, is_shared=shares_gpu)
    with share.explained():
        learner = Learner(config, gpu_bytes=share.step_bytes)
        if resume is not None:
            checkpoint.load(learner, resume)
    source = WeightSource(learner.model, dtype=getattr(torch, config.model.dtype))
    orchestrator = OrchestratorClient(orchestrator_url, token=token, publish_timeout_s=timeout_s)
    transfer = TransferSettings(
        backend=weight_transfer, rank=ranks.index(), weights_dir=weights_dir, timeout_s=timeout_s
    )
    try:
        with share.explained(), closing(publisher(transfer, config.engine, source=source, link=orchestrator)) as sender:
            loop = _LearnerLoop(
                learner,
                orchestrator,
                source=source,
                sender=sender,
                run_dir=run_dir,
                share=share,
                # Without lag there is no batch before, and on a shared GPU there may be no room for both.
                waits=shares_gpu or config.rollout.max_lag == 0,
            )
            loop.run()
    finally:
        orchestrator.close()
        ranks.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Publication:
    """One publication, and its cost so far."""

    num_bytes: int
    blocked_s: float  # spent by the learner
    whole_s: float  # until the engines had proven it

    def metrics(self) -> dict[str, float]:
        return {
            "learner/publish_s": self.blocked_s,
            "learner/publish_beside_s": max(0.0, self.whole_s - self.blocked_s),
            "learner/publish_bytes": float(self.num_bytes),
            "learner/publish_bytes_per_s": self.num_bytes / self.whole_s,
        }


class _LearnerLoop:
    """The loop of one rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        learner: Learner,
        orchestrator: OrchestratorClient,
        *,
        source: WeightSource,
        sender: Publisher,
        run_dir: Path,
        share: GpuShare,
        waits: bool,
    ) -> None:
        """`waits`: each publication must be proven before the next batch is asked for."""
        self._learner = learner
        self._orchestrator = orchestrator
        self._source = source
        self._sender = sender
        self._share = share
        self._waits = waits
        self._run = RunFolder(path=run_dir)
        self._first_version = learner.policy_version
        self._probe_ids = list(range(min(PROBE_TOKENS, learner.model.config.vocab_size)))

    def run(self) -> None:
        """Until the run is over."""
        while True:
            published = self._publish()
            if self._waits or self._is_saving():  # a checkpoint is only made of weights that the engines hold
                published = self._proven(published)
            if self._is_saving():
                self._save_what_is_due()
            batch, wait_batch_s = self._rest_of_batch()
            if batch is None:
                self._proven(published)
                return self._finish()
            output = self._learner.step(batch)
            self._annotate(is_refused=output.skipped)
            self._probe_ids = batch.trajectories()[0].token_ids()[:PROBE_TOKENS]
            # The publication before this step: a step is reported before its own weights are published.
            published = self._proven(published)
            if ranks.is_first():
                metrics = {**output.metrics, "learner/wait_batch_s": wait_batch_s, **published.metrics()}
                oldest = checkpoint.oldest_version(self._run.states)
                self._orchestrator.report(
                    replace(output, metrics=metrics, resumable_from=oldest, wait_batch_s=wait_batch_s)
                )

    def _annotate(self, *, is_refused: bool) -> None:
        """Write for viewers what the step made of its episodes. A disk that does not take it does not end the run."""
        learner = self._learner
        if not learner.config.metrics.annotate or not ranks.is_first():
            return
        found = [one for group in learner.last_stats for one in group.annotations(is_refused=is_refused)]
        try:
            learner_notes.write(self._run, learner.policy_version, found)
        except OSError as error:
            log.warning("the learner's numbers of step %d are not written: %s", learner.policy_version, error)

    def _publish(self) -> _Publication:
        """Publish the present version, and again for an engine that was restarted meanwhile.

        Over a folder the engines may still be taking it on return.
        """
        version = self._learner.policy_version
        self._share.make_room()
        with _clock() as blocked_s:
            probe = Probe(token_ids=tuple(self._probe_ids), logprobs=tuple(self._learner.logprobs(self._probe_ids)))
            while (num_bytes := _agreed(lambda: self._sent(version, probe), int | None)) is None:
                log.warning("an engine was restarted while it took version %d: publishing again", version)
                self._sender.reopen()
        return _Publication(num_bytes=num_bytes, blocked_s=blocked_s[0], whole_s=blocked_s[0])

    def _proven(self, published: _Publication) -> _Publication:
        """Wait until every engine holds what was published. Raises LearnerError."""
        with _clock() as blocked_s:
            after_s = self._sender.proven()
        return _Publication(
            num_bytes=published.num_bytes,
            blocked_s=published.blocked_s + blocked_s[0],
            whole_s=published.whole_s + after_s,
        )

    def _sent(self, version: int, probe: Probe) -> int | None:
        """Bytes sent; None if the weights must be published again."""
        try:
            return self._sender.publish(policy_version=version, probe=probe)
        except WeightsWanted:
            return None

    def _rest_of_batch(self) -> tuple[Batch | None, float]:
        """The next batch, without the parts of it that the learner got before; None when the run is over.

        And the seconds spent waiting for it and for its parts.
        """
        num_known, waited_s = 0, 0.0
        while True:
            with _clock() as wait_s:
                part = self._next_part(num_known)
            waited_s += wait_s[0]
            if part is None:
                self._learner.drop_parts()
                return None, waited_s
            self._share.begin_step()
            if not part.num_missing:
                return part, waited_s
            self._learner.add(part)
            num_known += len(part.groups)

    def _next_part(self, num_known: int) -> Batch | None:
        """The next batch, or a part of it, without the first `num_known` groups; None when the run is over.

        Meanwhile restarted engines are sent the present version.
        """
        while True:
            answer: Batch | NoBatch = _agreed(lambda: self._polled(num_known), Batch | NoBatch)
            if isinstance(answer, Batch):
                return answer
            if answer is NoBatch.RUN_OVER:
                return None
            if answer is NoBatch.PUBLISH_AGAIN:
                log.warning("an engine was restarted: publishing version %d again", self._learner.policy_version)
                self._sender.reopen()
                published = self._publish()
                if self._waits:
                    self._proven(published)

    def _polled(self, num_known: int) -> Batch | NoBatch:
        if not ranks.is_first():
            return NoBatch.NOT_YET
        try:
            return self._orchestrator.poll(self._learner.policy_version, num_known)
        except LearnerError:
            self._sender.proven()  # raises the cause, where engines that refused the weights ended the run
            raise

    def _is_saving(self) -> bool:
        version, settings = self._learner.policy_version, self._learner.config.learner
        is_new = version > self._first_version
        return is_new and (_is_due(version, settings.save_every) or _is_due(version, settings.checkpoint_every))

    def _save_what_is_due(self) -> None:
        version, settings = self._learner.policy_version, self._learner.config.learner
        if _is_due(version, settings.save_every):
            self._export(f"step_{version}")
        if _is_due(version, settings.checkpoint_every):
            self._save_state()

    def _finish(self) -> None:
        version, every = self._learner.policy_version, self._learner.config.learner.checkpoint_every
        if every and version > self._first_version and not _is_due(version, every):
            self._save_state()
        self._export("final")
        if ranks.is_first():
            self._orchestrator.finish()

    def _export(self, name: str) -> None:
        if ranks.is_first():
            learner = self._learner
            target = self._run.path / "checkpoints" / name
            origin = Origin(run=self._run.path.name, version=learner.policy_version)
            folder.export(self._source, learner.model, learner.config.model.path, target, origin=origin)
        else:
            self._source.take_part()

    def _save_state(self) -> None:
        checkpoint.save(self._learner, self._run.states, keep=self._learner.config.learner.keep_checkpoints)


def _num_threads(learner: LearnerConfig) -> int:
    """CPU threads of this rank: see `learner.num_threads`. Every rank must call it."""
    if learner.num_threads is not None or not learner.offload_optimizer:
        return learner.num_threads or 1
    found = max(1, len(os.sched_getaffinity(0)) // ranks.on_this_machine())
    log.info("learner.offload_optimizer: the step on the CPU uses %d threads (learner.num_threads)", found)
    return found


def _agreed(action: Callable[[], T], kind: Any) -> T:
    """Every rank acts; all return rank 0's result, a `kind`, since all must do the same next."""
    return ranks.of_first(action(), kind)


def _is_due(step: int, every: int) -> bool:
    return step > 0 and every > 0 and step % every == 0


@contextmanager
def _clock() -> Iterator[list[float]]:
    """Appends the seconds spent inside the block to the yielded list."""
    elapsed_s: list[float] = []
    started_s = time.monotonic()
    yield elapsed_s
    elapsed_s.append(time.monotonic() - started_s)
