"""Wires rollouts, buffer, learner and weight updates together, and says when the run is over.

Three activities share one TaskGroup; none holds another:

    rollouts   consume tasks; wait for a slot; produce finished groups into the buffer
    conductor  takes a batch from the buffer, offers it, waits for the step and then for the weights, and begins again
    HTTP       hands the learner what the conductor offers, and the conductor what the learner reports

Generation never waits for the learner's step: rollouts only stop when every slot is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from agentrl.breaker import ErrorBreaker
from agentrl.buffer import TrajectoryBuffer
from agentrl.canary import Canaries
from agentrl.config import Config
from agentrl.engine import Engine, TrainableEngine
from agentrl.errors import InfraError, NoLearningSignal, raise_first
from agentrl.ess_guard import EssGuard
from agentrl.evaluate import evaluate
from agentrl.journal import GroupState, Journal
from agentrl.learner_seat import LearnerSeat
from agentrl.meter import MeteredEngine
from agentrl.metrics import MetricsLog, rollout_metrics
from agentrl.run_folder import Kind, RunFolder
from agentrl.source import TaskSource
from agentrl.statistics import EvalResult
from agentrl.types import Batch, StepOutput, Task, TrajectoryGroup

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Whoever shows the run to a person."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step was made and its weights are in the engines."""

    def evaluated(self, result: EvalResult) -> None:
        """A held-out measurement is there."""

    def evaluating(self, done: int, total: int) -> None:
        """A held-out measurement is under way."""


class PlayGroup(Protocol):
    """Plays one task `size` times; raises InfraError when that could not be done."""

    def __call__(self, engine: Engine, group_id: int, task: Task, *, kind: Kind) -> Awaitable[TrajectoryGroup]:
        """The finished group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run came to."""

    num_steps: int
    before: EvalResult
    after: EvalResult
    train_s: float
    overlap: float  # share of the learner's working time during which the engine generated
    note: str = ""  # why it ended early, if it did


class Orchestrator:
    """One run.

    Args:
        engine: where tokens come from.
        play_group: how a task becomes a group of trajectories.
        held_out: tasks of the evaluations, the same every time.
        canaries: checked every `rollout.canary_every` steps; the start is the caller's.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: TrainableEngine,
        play_group: PlayGroup,
        source: TaskSource,
        held_out: Sequence[Task],
        run: RunFolder,
        metrics: MetricsLog,
        observer: Observer,
        canaries: Canaries | None = None,
    ) -> None:
        self._config = config
        self._engine = MeteredEngine(engine)
        self._play_group = play_group
        self._source = source
        self._held_out = held_out
        self._run = run
        self._metrics = metrics
        self._observer = observer
        self._canaries = canaries
        self._journal = Journal(run.journal)
        self._buffer = TrajectoryBuffer(
            groups_per_step=config.rollout.groups_per_step,
            max_lag=config.rollout.max_lag,
            on_stale=config.rollout.on_stale,
            journal=self._journal,
            drop_zero_variance=config.algorithm.needs_spread,
            requeue=source.give_back,
        )
        self._ess_guard = EssGuard(
            max_lag=config.rollout.max_lag,
            floor=config.algorithm.ess_floor,
            num_steps=config.algorithm.ess_floor_steps,
        )
        self._breaker = ErrorBreaker(config.rollout.max_infra_error_rate)
        self._learner = LearnerSeat(self._engine)
        self._finished: list[TrajectoryGroup] = []
        self._slot_wait_s = 0.0
        self._latest: EvalResult | None = None

    @property
    def learner_port(self) -> LearnerSeat:
        """The learner's side, to be served over HTTP."""
        return self._learner

    async def run(self) -> Summary:
        """Train until the steps, or the minutes, are used up. Raises what ended it otherwise."""
        try:
            first = await self._learner.weights(within_s=self._config.learner.start_timeout_s)
            before = self._latest = await self._evaluate(first.policy_version)
            started = time.monotonic()
            rollouts = asyncio.create_task(self._roll(), name="rollouts")
            try:
                note = await self._conduct(rollouts, started)
            finally:
                rollouts.cancel()
                with suppress(asyncio.CancelledError):
                    await rollouts
            train_s = time.monotonic() - started
            version = self._buffer.version
            await self._learner.finish()
            after = self._latest if self._latest.policy_version == version else await self._evaluate(version)
            overlap = self._learner.overlap
            self._metrics.log("event", version, {"run/overlap": overlap, "run/train_s": train_s})
            return Summary(num_steps=version, before=before, after=after, train_s=train_s, overlap=overlap, note=note)
        finally:
            self._journal.close()

    async def _conduct(self, rollouts: asyncio.Task[None], started: float) -> str:
        """One step after the other; returns why it ended before its time, or nothing."""
        limits = self._config.train
        for step in range(1, limits.steps + 1):
            if limits.max_minutes is not None and time.monotonic() - started > 60 * limits.max_minutes:
                return f"the {limits.max_minutes:g} minutes of train.max_minutes were used up"
            step_started, tokens, busy_s = time.monotonic(), self._engine.num_tokens, self._engine.busy.seconds
            try:
                batch = await self._next_batch(rollouts)
            except NoLearningSignal as error:
                if step == 1:
                    raise
                return str(error)
            output = await self._learner.train(batch, within_s=self._config.learner.step_timeout_s)
            ref = await self._learner.weights(within_s=self._config.learner.step_timeout_s)
            await self._buffer.commit(ref.policy_version)
            await self._act_on_ess(output)
            seconds = time.monotonic() - step_started
            timing = {
                "engine/tokens_per_s": (self._engine.num_tokens - tokens) / seconds,
                "engine/busy_share": min(1.0, (self._engine.busy.seconds - busy_s) / seconds),
                "run/step_s": seconds,
                "run/overlap": self._learner.overlap,
            }
            await self._record(step, batch, output, timing)
            await self._check_canaries(step)
            if self._config.eval.every and step % self._config.eval.every == 0 and step < limits.steps:
                self._latest = await self._evaluate(step)
        return ""

    async def _check_canaries(self, step: int) -> None:
        every = self._config.rollout.canary_every
        if self._canaries is not None and every and step % every == 0:
            await self._canaries.check(when=f"after step {step}")

    async def _act_on_ess(self, output: StepOutput) -> None:
        """Admit with less lag while the effective sample size is low, with more when it has recovered."""
        before, lag = self._ess_guard.lag, self._ess_guard.observe(output.ess_ratio)
        if lag == before:
            return
        floor = self._config.algorithm.ess_floor
        log.warning("ESS ratio %s, ess_floor %s: admission works with lag %d now", output.ess_ratio, floor, lag)
        await self._buffer.set_lag(lag)

    async def _next_batch(self, rollouts: asyncio.Task[None]) -> Batch:
        """A full batch. Raises what ended the rollouts, or InfraError when none comes together."""
        take = asyncio.create_task(self._buffer.take(), name="take batch")
        try:
            await asyncio.wait(
                {take, rollouts}, timeout=self._config.train.stall_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if take.done():
                return take.result()
            if rollouts.done():
                rollouts.result()
            raise InfraError(
                f"no full batch came together within train.stall_timeout_s={self._config.train.stall_timeout_s:g} s; "
                f"the ledger stands at {self._buffer.ledger()}"
            )
        finally:
            take.cancel()

    async def _roll(self) -> None:
        """Keep every slot busy until cancelled."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    task = self._source.next()
                    asked = time.monotonic()
                    group_id = await self._buffer.admit(task)
                    self._slot_wait_s += time.monotonic() - asked
                    groups.create_task(self._one_group(group_id, task), name=f"group {group_id}")
        except BaseExceptionGroup as errors:
            raise_first(errors)

    async def _one_group(self, group_id: int, task: Task) -> None:
        try:
            group = await self._play_group(self._engine, group_id, task, kind="train")
        except InfraError as error:
            log.warning("group %d (task %s) failed: %s", group_id, task.id, error)
            await self._buffer.fail(group_id, str(error))
            self._breaker.failure(error)
            return
        except asyncio.CancelledError:
            await self._buffer.fail(group_id, "the run ended", state=GroupState.CANCELLED)
            raise
        self._breaker.success()
        self._finished.append(group)
        await self._buffer.finish(group)

    async def _record(self, step: int, batch: Batch, output: StepOutput, timing: Mapping[str, float]) -> None:
        ledger = self._buffer.ledger()
        assert ledger.balanced(), ledger
        finished, self._finished = self._finished, []
        dropped_lengths = self._buffer.pop_dropped_lengths()
        slot_wait_s, self._slot_wait_s = self._slot_wait_s, 0.0
        values = {
            **output.metrics,
            **rollout_metrics(finished or batch.groups),
            **{f"ledger/{name}": float(getattr(ledger, name)) for name in ledger.__slots__},
            "buffer/ready_groups": float(ledger.ready),
            "buffer/in_flight_groups": float(ledger.in_flight),
            "buffer/admission_lag": float(self._ess_guard.lag),
            **self._engine.metrics(),
            **(self._learner.last_update.metrics() if self._learner.last_update else {}),
            "wait/learner_for_batch_s": output.metrics["learner/wait_batch_s"],
            "wait/rollout_for_slot_s": slot_wait_s,
            **timing,
        }
        if dropped_lengths:
            values["buffer/dropped_stale_tokens_mean"] = sum(dropped_lengths) / len(dropped_lengths)
        self._metrics.log("step", step, values)
        self._observer.step(step, values)
        await asyncio.to_thread(self._run.write_trajectories, step, batch.groups)

    async def _evaluate(self, policy_version: int) -> EvalResult:
        """Measure the weights the engines hold now; the learner waits meanwhile, so that they are one version."""
        per_group = self._config.eval.samples_per_task
        evaluation = await evaluate(
            self._held_out,
            make_group=lambda index, task: self._play_group(self._engine, index, task, kind="eval"),
            policy_version=policy_version,
            max_concurrent_groups=max(1, 2 * self._config.engine.max_running // per_group),
            progress=self._observer.evaluating,
        )
        self._metrics.log("eval", policy_version, evaluation.result.metrics())
        await asyncio.to_thread(self._run.write_trajectories, policy_version, evaluation.groups, kind="eval")
        self._observer.evaluated(evaluation.result)
        return evaluation.result
