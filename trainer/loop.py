"""The learner process's loop: fetch a batch, step, report, publish. Speaks
agentrl/train/learner_schema.py; knows no maths and no model.

Rank 0 alone speaks to the orchestrator, and tells the others. Every call has a deadline. An orchestrator that cannot be
reached is asked again for 30 s (its answers are repeatable), then the process ends; an answer that says no ends it at
once.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from torch import distributed

from agentrl.config import Config
from agentrl.errors import LearnerError, WeightsWanted, boundary
from agentrl.run_folder import RunFolder
from agentrl.train import learner_api as api
from agentrl.types import Batch, Probe, StepOutput, TransferInit, WeightsRef
from trainer import checkpoint, ranks
from trainer.learner import Learner
from trainer.weights import folder as weights
from trainer.weights.source import WeightSource
from trainer.weights.transfer import Publisher, Transfer, publisher

log = logging.getLogger(__name__)
T = TypeVar("T")

GONE_AFTER_S = 30.0
RETRY_EVERY_S = 0.5
PROBE_TOKENS = 64


class Verdict(Enum):
    """What the orchestrator answers where it gives no batch."""

    NOT_YET = auto()
    PUBLISH_AGAIN = auto()
    """An engine was restarted and holds none of our weights."""
    OVER = auto()


AGAIN = 205
VERDICTS = {204: Verdict.NOT_YET, AGAIN: Verdict.PUBLISH_AGAIN, 410: Verdict.OVER}


class Orchestrator:
    """The routes of api.py, seen from the learner."""

    def __init__(
        self, url: str, *, token: str, publish_timeout_s: float = 300.0, gone_after_s: float = GONE_AFTER_S
    ) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}", api.LEARNER_HEADER: uuid.uuid4().hex}
        self._client = httpx.Client(base_url=url, headers=headers, trust_env=False)
        self._publish_timeout_s = publish_timeout_s
        self._gone_after_s = gone_after_s

    def poll(self, policy_version: int) -> Batch | Verdict:
        """One long poll for the batch of this version. Raises LearnerError."""
        response = self._call(
            lambda: self._client.get(
                api.BATCH,
                params={"policy_version": policy_version},
                timeout=api.LONG_POLL_S + self._gone_after_s,
            )
        )
        if response.status_code in VERDICTS:
            return VERDICTS[response.status_code]
        with boundary(LearnerError, "reading the batch"):
            return api.decode(response.content, Batch)

    def report(self, output: StepOutput) -> None:
        """A step was made."""
        self._post(api.STEP, output, timeout_s=self._gone_after_s)

    def open_transfer(self, init: TransferInit) -> None:
        """Returns once every engine has joined the learner's group."""
        self._post(api.TRANSFER, init, timeout_s=self._publish_timeout_s)

    def publish(self, ref: WeightsRef) -> None:
        """Returns once every engine holds the weights and has proven it. Raises WeightsWanted: publish again."""
        response = self._post(api.WEIGHTS, ref, timeout_s=self._publish_timeout_s)
        if response.status_code == AGAIN:
            raise WeightsWanted(f"an engine was restarted while it took version {ref.policy_version}")

    def finish(self) -> None:
        """The last weights were exported."""
        self._call(lambda: self._client.post(api.FINISHED, timeout=self._gone_after_s))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, route: str, record: StepOutput | TransferInit | WeightsRef, *, timeout_s: float) -> httpx.Response:
        body, headers = api.encode(record), {"Content-Type": api.MEDIA_TYPE}
        return self._call(lambda: self._client.post(route, content=body, headers=headers, timeout=timeout_s))

    def _call(self, request: Callable[[], httpx.Response]) -> httpx.Response:
        """Raises LearnerError when nobody answers for `gone_after_s`, or when the answer is a refusal."""
        deadline_s = time.monotonic() + self._gone_after_s
        while True:
            try:
                response = request()
                break
            except httpx.TransportError as error:
                if isinstance(error, httpx.ReadTimeout) or time.monotonic() > deadline_s:
                    raise LearnerError(
                        f"the orchestrator at {self._url} is gone: {error or type(error).__name__}"
                    ) from error
                time.sleep(RETRY_EVERY_S)
        if response.status_code >= 400 and response.status_code != 410:
            raise LearnerError(f"the orchestrator answered {response.status_code}: {response.text[:500]}")
        return response


def run(
    config: Config,
    *,
    orchestrator_url: str,
    token: str,
    weights_dir: Path,
    run_dir: Path,
    weight_transfer: str,
    resume: Path | None = None,
) -> None:
    """Train until the orchestrator says that the run is over, then leave `run_dir/checkpoints/final`.

    `learner/publish_s` is the time the publication *before* this step took: a step is reported before its weights.

    Args:
        weight_transfer: how versions reach the engines: one of engine_server.Transfer.
        resume: a checkpoint, or a folder of them, to go on from; the orchestrator must stand at its version.

    Raises LearnerError, StaleTrajectoryError or ConfigError; the process that calls it should then end with an error.
    """
    torch.set_num_threads(config.learner.num_threads)
    learner = Learner(config)
    if resume is not None:
        checkpoint.load(learner, resume)
    source = WeightSource(learner.model, dtype=getattr(torch, config.model.dtype))
    # The engine may have to be restarted within one publication, and take the weights twice.
    timeout_s = config.engine.start_timeout_s + 2 * config.engine.update_timeout_s + config.engine.request_timeout_s
    orchestrator = Orchestrator(orchestrator_url, token=token, publish_timeout_s=timeout_s)
    transfer = Transfer(
        backend=weight_transfer, rank=distributed.get_rank(), weights_dir=weights_dir, timeout_s=timeout_s
    )
    try:
        with closing(publisher(transfer, config.engine, source=source, link=orchestrator)) as sender:
            _loop(learner, orchestrator, config, source=source, sender=sender, run_dir=run_dir)
    finally:
        orchestrator.close()
        distributed.destroy_process_group()


def _loop(
    learner: Learner,
    orchestrator: Orchestrator,
    config: Config,
    *,
    source: WeightSource,
    sender: Publisher,
    run_dir: Path,
) -> None:
    is_first_rank = distributed.get_rank() == 0
    probe_ids = list(range(min(PROBE_TOKENS, learner.model.config.vocab_size)))

    def export(name: str) -> None:
        if is_first_rank:
            weights.export(source, learner.model, config.model.path, run_dir / "checkpoints" / name)
        else:
            source.take_part()

    def save_state() -> None:
        checkpoint.save(learner, RunFolder(path=run_dir).states, keep=config.learner.keep_checkpoints)

    first_version, every = learner.policy_version, config.learner.checkpoint_every
    while True:
        published = _publish(learner, sender, probe_ids)
        if (version := learner.policy_version) > first_version:
            if _is_due(version, config.learner.save_every):
                export(f"step_{version}")
            if _is_due(version, every):
                save_state()
        with _clock() as wait_batch_s:
            batch = _next_batch(learner, orchestrator, sender, probe_ids)
        if batch is None:
            if every and version > first_version and not _is_due(version, every):
                save_state()
            export("final")
            return orchestrator.finish() if is_first_rank else None
        output = learner.step(batch)
        probe_ids = batch.trajectories()[0].token_ids()[:PROBE_TOKENS]
        if is_first_rank:
            metrics = {**output.metrics, "learner/wait_batch_s": wait_batch_s[0], **published}
            oldest = checkpoint.oldest_version(RunFolder(path=run_dir).states)
            orchestrator.report(replace(output, metrics=metrics, resumable_from=oldest, wait_batch_s=wait_batch_s[0]))
            log.info("step %d: %s", output.policy_version, _summary(output.metrics))


def _publish(learner: Learner, sender: Publisher, probe_ids: list[int]) -> dict[str, float]:
    """Publish the present version, again for an engine that was restarted meanwhile; what it took, as metrics."""
    with _clock() as publish_s:
        probe = Probe(token_ids=tuple(probe_ids), logprobs=tuple(learner.logprobs(probe_ids)))
        while (num_bytes := _agreed(lambda: _sent(sender, learner.policy_version, probe), int | None)) is None:
            log.warning("an engine was restarted while it took version %d: publishing again", learner.policy_version)
            sender.reopen()
    return {"learner/publish_s": publish_s[0], "learner/publish_bytes_per_s": num_bytes / publish_s[0]}


def _sent(sender: Publisher, policy_version: int, probe: Probe) -> int | None:
    try:
        return sender.publish(policy_version=policy_version, probe=probe)
    except WeightsWanted:
        return None


def _next_batch(learner: Learner, orchestrator: Orchestrator, sender: Publisher, probe_ids: list[int]) -> Batch | None:
    """The batch to consume now; None when the run is over. Restarted engines are given the present version."""
    is_first_rank = distributed.get_rank() == 0
    while True:
        answer: Batch | Verdict = _agreed(
            lambda: orchestrator.poll(learner.policy_version) if is_first_rank else Verdict.NOT_YET, Batch | Verdict
        )
        if answer is Verdict.OVER:
            return None
        if answer is Verdict.PUBLISH_AGAIN:
            log.warning("an engine was restarted: publishing version %d again", learner.policy_version)
            sender.reopen()
            _publish(learner, sender, probe_ids)
        elif isinstance(answer, Batch):
            return answer


def _agreed(action: Callable[[], T], kind: Any) -> T:
    """Every rank acts; rank 0's result, a `kind`, counts on all of them, since all must do the same next."""
    return ranks.of_first(action(), kind)


def _is_due(step: int, every: int) -> bool:
    return step > 0 and every > 0 and step % every == 0


@contextmanager
def _clock() -> Iterator[list[float]]:
    """Seconds spent inside, in the yielded list once the block is left."""
    elapsed_s: list[float] = []
    started_s = time.monotonic()
    yield elapsed_s
    elapsed_s.append(time.monotonic() - started_s)


def _summary(metrics: dict[str, Any]) -> str:
    names = ("ess_ratio", "lr_scale", "grad_norm", "lag_max", "step_s")
    return ", ".join(f"{name} {metrics[key]:.4g}" for name in names if (key := f"learner/{name}") in metrics)
