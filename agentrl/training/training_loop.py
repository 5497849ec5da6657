"""The training loop: take a batch, offer it to the learner, wait for the step and then for the new weights, repeat.

With max_lag > 0 the learner is offered the next batch while the engines take the new weights. With
learner.stream_groups it is offered each group of a batch as soon as the group has finished.

Independent of how episodes are played (rollout_loop.py) and of how a step is computed (the learner's process).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from agentrl.buffer.ess_guard import EssGuard
from agentrl.buffer.journal import Journal
from agentrl.buffer.journal_format import StepState, StepTimes
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config import Config
from agentrl.engine.metered import MeteredEngine
from agentrl.engine.vllm_server import publication_timeout_s
from agentrl.env.canary import Canaries
from agentrl.errors import NoLearningSignal, raise_first
from agentrl.report.metrics import rollout_metrics
from agentrl.report.observer import StepReport
from agentrl.supervision.wait_graph import Gauges, WaitGraph
from agentrl.training.learner_session import LearnerSession
from agentrl.training.rollout_loop import RolloutLoop, VersionedTaskSource
from agentrl.types import Batch, StepOutput, WeightsRef

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The parts that the steps of one attempt work with. A run that resumes begins a new attempt with new parts.

    Example: `TrainingLoop(config, LoopParts(session=session, buffer=buffer, ...), ...)`, in orchestrator.py.
    """

    session: LearnerSession
    buffer: TrajectoryBuffer
    rollouts: RolloutLoop
    tasks: VersionedTaskSource
    journal: Journal
    engine: MeteredEngine
    ess_guard: EssGuard
    canaries: Canaries | None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Mark:
    """What was done up to a moment."""

    at_s: float
    num_tokens: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeStep:
    """A step of the learner whose weights the engines do not hold yet."""

    step: int
    batch: Batch
    output: StepOutput
    began: _Mark
    times: tuple[float, float, float]  # Unix: waited for the batch, took it, the learner had made the step


class TrainingLoop:
    """Makes the steps of a run, from the buffer's version to the last.

    Args:
        record: stores the report on a step and its batch.
        evaluate: measures a version that the engines hold: beside training with eval.engines, else while it waits.
        trained_s: seconds spent training before this attempt, in a run that was resumed.
        wait_graph: records the waits. The watchdog that reads it ends waits without a deadline of their own.

    Example:
        loop = TrainingLoop(config, parts, record=record, evaluate=evaluate, trained_s=0.0, wait_graph=wait_graph)
        note = await loop.run()
    """

    def __init__(
        self,
        config: Config,
        parts: LoopParts,
        *,
        record: Callable[[StepReport, Batch], Awaitable[None]],
        evaluate: Callable[[WeightsRef], Awaitable[None]],
        trained_s: float,
        wait_graph: WaitGraph,
    ) -> None:
        self._config = config
        self._parts = parts
        self._record = record
        self._evaluate = evaluate
        self._started = time.monotonic() - trained_s
        self._wait_graph = wait_graph
        self._lag = 0
        self._publication: asyncio.Task[None] | None = None
        self._committed = self._mark()
        self._held: WeightsRef | None = None  # in the engines

    def gauges(self) -> Gauges:
        """How far the loop is."""
        parts, ledger, signal = self._parts, self._parts.buffer.ledger(), self._parts.buffer.signal
        return Gauges(
            step=parts.buffer.version,
            num_steps=self._config.train.steps,
            version=parts.buffer.version,
            learner_version=max(parts.session.made_version, parts.buffer.version),
            lag=self._lag,
            max_lag=StalenessRule.of(self._config.rollout).largest_lag,
            num_tokens=parts.engine.num_tokens,
            ledger={name: getattr(ledger, name) for name in ledger.__slots__},
            queues={
                "ready groups": ledger.ready,
                "groups in flight": ledger.in_flight,
                "slots": parts.buffer.num_slots,
            },
            useful_groups=signal.useful_share if signal.groups else None,
            learning=signal.lines(),
        )

    @property
    def train_s(self) -> float:
        """Seconds spent training, including those before a resume."""
        return time.monotonic() - self._started

    async def run(self) -> str:
        """Make every step. Returns why it ended early, or an empty text. Raises the error that ended it otherwise."""
        try:
            async with asyncio.TaskGroup() as publications:
                return await self._steps(publications)
        except BaseExceptionGroup as errors:
            raise_first(errors)

    async def _steps(self, publications: asyncio.TaskGroup) -> str:
        """The engines take a step's weights while the learner has the next batch, where nothing must wait for them."""
        settings = self._config.train
        for step in range(self._parts.buffer.version + 1, settings.steps + 1):
            if self._left_s is not None and self._left_s < 0:
                return self._used_up
            try:
                made = await self._made(step)
            except NoLearningSignal as error:
                if step == 1:
                    raise
                return str(error)
            if made is None:
                why = ". ".join(self._parts.buffer.signal.lines()) or "none has finished"
                return f"{self._used_up} while step {step} waited for groups: {why}"
            if self._publication is not None:
                await self._publication  # its weights are in the engines, but its record may still be written
            self._publication = publications.create_task(self._published(made), name=f"weights of step {step}")
            is_measured = self._is_measured(step) and not self._config.eval.engines
            if self._config.rollout.max_lag == 0 or is_measured or self._has_canaries(step):
                await self._publication
            await self._check_canaries(step)
            if is_measured:
                assert self._held is not None
                await self._evaluate(self._held)
        return ""

    def _is_measured(self, step: int) -> bool:
        """Whether the version that this step makes is measured before training is over."""
        return self._config.eval.is_due(step) and step < self._config.train.steps

    @property
    def _left_s(self) -> float | None:
        """What is left of train.max_minutes; None without that limit."""
        minutes = self._config.train.max_minutes
        return None if minutes is None else 60 * minutes - self.train_s

    @property
    def _used_up(self) -> str:
        return f"The {self._config.train.max_minutes:g} minutes of train.max_minutes were used up"

    async def _taken(self) -> Batch | None:
        """A full batch; None where train.max_minutes ended the wait for it."""
        take = self._taken_in_parts if self._config.learner.stream_groups else self._parts.buffer.take
        # The wait has no `within_s`, by which the watchdog would let it stall until then.
        with self._wait_graph.waiting("training loop", on="rollouts", what="a full batch"):
            try:
                async with asyncio.timeout(self._left_s) as limit:
                    return await take()
            except TimeoutError:
                if not limit.expired():
                    raise
                return None

    async def _taken_in_parts(self) -> Batch:
        """A full batch. Until there is one, the learner is offered those of its groups that have finished."""
        try:
            async with asyncio.TaskGroup() as group:
                offering = group.create_task(self._offer_parts(), name="parts of the batch")
                batch = await self._parts.buffer.take()
                offering.cancel()
        except BaseExceptionGroup as errors:
            raise_first(errors)
        return batch

    async def _offer_parts(self) -> None:
        num_offered = 0
        while True:
            part = await self._parts.buffer.part(num_offered)
            num_offered = len(part.groups)
            await self._parts.session.offer(part)

    async def _made(self, step: int) -> _MadeStep | None:
        """Take a batch and have the learner make the step; None where the time was used up before there was one."""
        parts, began, waited_at = self._parts, self._mark(), time.time()
        batch = await self._taken()
        if batch is None:
            return None
        taken_at = time.time()
        parts.rollouts.stop(parts.buffer.pop_restarted())
        new_groups = batch.groups[: len(batch.groups) - batch.num_replayed]
        self._lag = max(batch.policy_version - group.policy_version for group in new_groups)
        if self._config.engine.sleep_while_training:
            await parts.engine.sleep()  # until the new weights wake it
        elif self._config.rollout.oversample > 1 and self._config.rollout.partial != "restart":
            await parts.engine.pause()  # unfinished groups go on with the new weights
        within_s = self._config.learner.step_timeout_s
        if self._publication is not None and not self._publication.done():
            within_s += publication_timeout_s(self._config.engine)  # the learner reports the step after it
        with self._wait_graph.waiting("training loop", on="learner", what="a step", within_s=within_s):
            output = await parts.session.train(batch, within_s=within_s)
        times = (waited_at, taken_at, time.time())
        await parts.buffer.stepped(output.policy_version)
        return _MadeStep(step=step, batch=batch, output=output, began=began, times=times)

    async def _published(self, made: _MadeStep) -> None:
        """Wait until every engine holds the step's weights, then record it."""
        parts = self._parts
        within_s = max(self._config.learner.step_timeout_s, publication_timeout_s(self._config.engine))
        with self._wait_graph.waiting("training loop", on="learner", what="new weights", within_s=within_s):
            ref = await parts.session.weights(within_s=within_s)
        waited_at, taken_at, stepped_at = made.times
        times = StepTimes(waited_at=waited_at, taken_at=taken_at, stepped_at=stepped_at, held_at=time.time())
        await self._act_on_ess(made.output)
        parts.tasks.committed(ref.policy_version)
        await parts.buffer.commit(ref.policy_version)
        began, self._committed = max(made.began, self._committed), self._mark()
        seconds = self._committed.at_s - began.at_s
        timing = {
            "engine/tokens_per_s": (self._committed.num_tokens - began.num_tokens) / seconds,
            "engine/busy_share": min(1.0, (self._committed.busy_s - began.busy_s) / seconds),
            "run/step_s": seconds,
            "run/overlap": parts.session.overlap,
        }
        metrics = self._metrics(made, timing)
        report = StepReport(
            step=made.step,
            output=made.output,
            update=parts.session.last_update,
            metrics=metrics,
            signal=parts.buffer.signal,
        )
        await self._record(report, made.batch)
        # Last: a step that a crash leaves without this mark is recorded again.
        state = StepState(ess_guard=parts.ess_guard.state_dict(), train_s=self.train_s, times=times)
        parts.journal.step_made(made.step, state, resumable_from=made.output.resumable_from)
        self._held = ref
        if self._config.eval.engines and self._is_measured(made.step):
            await self._evaluate(ref)  # now: the learner deletes these weights once it has made two more steps

    def _mark(self) -> _Mark:
        engine = self._parts.engine
        return _Mark(at_s=time.monotonic(), num_tokens=engine.num_tokens, busy_s=engine.busy.seconds)

    def _has_canaries(self, step: int) -> bool:
        every = self._config.rollout.canary_every
        return self._parts.canaries is not None and bool(every) and step % every == 0

    async def _check_canaries(self, step: int) -> None:
        canaries = self._parts.canaries
        if canaries is not None and self._has_canaries(step):
            with self._wait_graph.waiting("training loop", on="canaries", what="known outcomes"):
                await canaries.check(when=f"after step {step}")

    async def _act_on_ess(self, output: StepOutput) -> None:
        """Admit groups with less lag while the effective sample size is low, with more when it has recovered."""
        guard = self._parts.ess_guard
        before, lag = guard.lag, guard.observe(output.ess_ratio)
        if lag == before:
            return
        floor = self._config.algorithm.ess_floor
        log.warning("ESS ratio %s, ess_floor %s: groups are now admitted with lag %g", output.ess_ratio, floor, lag)
        await self._parts.buffer.set_lag(lag)

    def _metrics(self, made: _MadeStep, timing: Mapping[str, float]) -> dict[str, float]:
        parts, ledger = self._parts, self._parts.buffer.ledger()
        assert ledger.balanced(), ledger
        update = parts.session.last_update
        values = {
            **made.output.metrics,
            **rollout_metrics(parts.rollouts.pop_finished() or made.batch.groups),
            **parts.buffer.pop_signal().metrics(),
            **{f"ledger/{name}": float(getattr(ledger, name)) for name in ledger.__slots__},
            "buffer/ready_groups": float(ledger.ready),
            "buffer/in_flight_groups": float(ledger.in_flight),
            "buffer/replayed_groups": float(made.batch.num_replayed),
            "buffer/admission_lag": float(parts.ess_guard.lag),
            **parts.engine.metrics(),
            **(update.metrics() if update else {}),
            # The wait for the first batch began before training did.
            "wait/learner_for_batch_s": min(made.output.wait_batch_s, timing["run/step_s"]),
            "wait/rollout_for_slot_s": parts.rollouts.pop_slot_wait_s(),
            **timing,
        }
        if dropped_lengths := parts.buffer.pop_dropped_lengths():
            values["buffer/dropped_stale_tokens_mean"] = sum(dropped_lengths) / len(dropped_lengths)
        return values
