"""The orchestrator: connects rollouts, buffer, learner and weight updates, and decides when the run is over.

Three activities share one TaskGroup; none owns another:

    rollout loop    draws tasks, waits for a slot, puts finished groups into the buffer
    training loop   takes a batch from the buffer, offers it, waits for the step and then for the weights, repeats
    learner API     hands the offered batch to the learner, and the learner's reports to the training loop

A run that is new, one that resumes after a crash, and one that has lost its learner all begin in the same way: from the
version of the learner, with the work that the journal says is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.buffer.ess_guard import EssGuard
from agentrl.buffer.journal import Journal, Resumption
from agentrl.buffer.journal_format import StepState
from agentrl.buffer.replay import Replay
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config import Config
from agentrl.data.source import TaskSource
from agentrl.engine.base import Engine, TrainableEngine
from agentrl.engine.metered import MeteredEngine
from agentrl.env.canary import Canaries
from agentrl.errors import LearnerReplaced, raise_first
from agentrl.report.evaluation import HeldOutSet
from agentrl.report.learning_signal import signal_in, total
from agentrl.report.metrics import MetricsLog, read, rollout_metrics
from agentrl.report.observer import Observer, StepReport, Summary
from agentrl.rollouts.group import PlayGroup
from agentrl.run_folder import RunFolder
from agentrl.supervision.wait_graph import Gauges, WaitGraph
from agentrl.training.evaluations import Evaluations, Records, SpareEngines
from agentrl.training.learner_session import LearnerSession, LearnerSessions
from agentrl.training.rollout_loop import ErrorBreaker, RolloutLoop, VersionedTaskSource
from agentrl.training.training_loop import LoopParts, TrainingLoop
from agentrl.types import Batch, TrajectoryGroup

log = logging.getLogger(__name__)

# The final export of a large model takes a while; the run itself is over and only waits for it.
EXPORT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What the environment contributes to a run.

    Example:
        held_out = HeldOutSet(tasks=tasks, num_plays=4, play_group=player.play_group)
        RolloutParts(play_group=player.play_group, source=TaskSource(env_class, config.env), held_out=[held_out])
    """

    play_group: PlayGroup[Engine]  # turns a task into a group of trajectories
    source: TaskSource  # from its beginning; a run that resumes skips the tasks it has drawn
    held_out: Sequence[HeldOutSet[Engine]]  # at least one; the run is judged by the first
    spare: SpareEngines | None = None  # of `eval.engines`
    canaries: Canaries | None = None  # checked every `rollout.canary_every` steps; the caller checks them at the start
    measure_with: Callable[[MeteredEngine], None] = lambda engine: None  # counts there what is generated elsewhere


class Orchestrator:
    """One run, from its first evaluation to its last.

    Args:
        engine: generates tokens.
        rollout_parts: what the environment contributes.
        wait_graph: records movements and waits; the caller has it watched (supervision/watchdog.py).

    Example:
        app = create_app(orchestrator.sessions, token=token)  # serve it to the learner, then:
        summary = await orchestrator.run()
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: TrainableEngine,
        rollout_parts: RolloutParts,
        run: RunFolder,
        metrics: MetricsLog,
        observer: Observer,
        wait_graph: WaitGraph | None = None,
    ) -> None:
        self._config = config
        self._wait_graph = wait_graph or WaitGraph()
        self._engine = MeteredEngine(engine, self._wait_graph)
        self._rollout_parts = rollout_parts
        rollout_parts.measure_with(self._engine)
        self._run = run
        self._metrics = metrics
        self._observer = observer
        replay = config.rollout.replay
        self._journal = Journal(run.journal, keep_trained=replay.capacity if replay else 0)
        history = self._journal.source_history()
        if config.rollout.partial == "restart":
            history = replace(history, returned=())  # the buffer draws these
        self._tasks = VersionedTaskSource(rollout_parts.source, history)
        self._evaluations = Evaluations(
            config,
            engine=self._engine,
            held_out=rollout_parts.held_out,
            spare=rollout_parts.spare,
            records=Records(run=run, journal=self._journal, metrics=metrics, observer=observer),
            wait_graph=self._wait_graph,
        )
        self._breaker = ErrorBreaker(config.rollout.max_infra_error_rate)
        self._sessions = LearnerSessions(self._engine)
        self._learner_connected = asyncio.Event()
        self._recorded = 0  # the last step whose metrics are stored

    async def learner_connected(self) -> None:
        """Wait for the learner's first weights: they show that it can start, so a restart can help."""
        await self._learner_connected.wait()

    @property
    def sessions(self) -> LearnerSessions:
        """The sessions of the learner, to be served over HTTP (learner_api.create_app)."""
        return self._sessions

    async def run(self) -> Summary:
        """Train until the steps, or the minutes, are used up. Raises the error that ended the run otherwise."""
        try:
            async with self._evaluations.beside_training():
                return await self._attempts()
        finally:
            await self._sessions.close()
            self._journal.close()

    async def _attempts(self) -> Summary:
        """Train with the learner that connects, and again with each that replaces it."""
        while True:
            session = await self._sessions.open()
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._sessions.replaced(), name="watch for another learner")
                    summary = await self._train(session)
                    watch.cancel()
                return summary
            except BaseExceptionGroup as errors:
                if not isinstance(errors.exceptions[0], LearnerReplaced):
                    raise_first(errors)
                log.warning("the learner was restarted: the run continues from the journal")

    async def _train(self, session: LearnerSession) -> Summary:
        """Train from the version of the learner to the end of the run."""
        within_s = self._config.learner.start_timeout_s
        starting = self._wait_graph.waiting("training loop", on="learner", what="its first weights", within_s=within_s)
        with self._wait_graph.phase("starting the learner"), starting:
            first = await session.weights(within_s=within_s)
        self._learner_connected.set()
        self._wait_graph.measure(lambda: self._gauges_at(first.policy_version))
        resumed = self._journal.resume_at(first.policy_version)
        self._recorded = self._journal.last_step()
        self._metrics.rewind(self._recorded)
        await self._record_lost_steps(resumed)
        if self._recorded:
            self._observer.resumed(first.policy_version, self._recorded)
        self._tasks.committed(first.policy_version + len(resumed.batches))
        # A measurement that was due here and that a crash cut short is made now.
        is_due = self._config.eval.is_due(first.policy_version)
        await self._evaluations.measure(first, only_if_none=not is_due)
        parts = self._loop_parts(session, resumed)
        loop = TrainingLoop(
            self._config,
            parts,
            record=self._record,
            evaluate=self._evaluations.measure,
            trained_s=resumed.state.train_s if resumed.state else 0.0,
            wait_graph=self._wait_graph,
        )
        self._wait_graph.measure(loop.gauges)
        with self._wait_graph.phase("training", then="finishing"):
            note = await _run_both(parts.rollouts, loop)
        version, train_s = parts.buffer.version, loop.train_s
        # With the time that the run waited for a step that it did not make: a resumed run goes on from here.
        times = self._journal.step_times().get(version)
        state = StepState(ess_guard=parts.ess_guard.state_dict(), train_s=train_s, times=times)
        self._journal.step_made(version, state, resumable_from=None)
        await session.finish()
        await self._evaluations.finish(version)
        await self._exported(session)
        values = {"run/overlap": session.overlap, "run/train_s": train_s, **parts.buffer.pop_signal().metrics()}
        self._metrics.log("event", version, values)
        (before, after), *others = self._evaluations.before_and_after(version)
        lines = read(self._run.metrics)
        return Summary(
            num_steps=version,
            before=before,
            after=after,
            others=tuple(others),
            train_s=train_s,
            overlap=session.overlap,
            note=note,
            signal=total(signal_in(line.values) for line in lines),
            num_refused=int(max((line.values.get("learner/skipped_steps", 0) for line in lines), default=0)),
        )

    def _gauges_at(self, version: int) -> Gauges:
        """How far the run is before the first step of this attempt."""
        return Gauges(
            step=version,
            num_steps=self._config.train.steps,
            version=version,
            learner_version=version,
            max_lag=StalenessRule.of(self._config.rollout).largest_lag,
            num_tokens=self._engine.num_tokens,
        )

    async def _exported(self, session: LearnerSession) -> None:
        waiting = self._wait_graph.waiting(
            "training loop", on="learner", what="its last export", within_s=EXPORT_TIMEOUT_S
        )
        with self._wait_graph.phase("exporting the trained model"), waiting:
            await session.exported(within_s=EXPORT_TIMEOUT_S)

    def _loop_parts(self, session: LearnerSession, resumed: Resumption) -> LoopParts:
        config = self._config
        guard = EssGuard(
            max_lag=config.rollout.max_lag,
            floor=config.algorithm.ess_floor,
            num_steps=config.algorithm.ess_floor_steps,
        )
        if resumed.state is not None:
            guard.load_state_dict(resumed.state.ess_guard)
        buffer = TrajectoryBuffer(
            StalenessRule.of(config.rollout),
            journal=self._journal,
            drop_zero_variance=config.algorithm.drops_equal_rewards,
            requeue=self._tasks.source.give_back,
            replay=self._replay_after(resumed.trained),
            resumed=resumed,
            lag=guard.lag,
        )
        rollouts = RolloutLoop(
            self._rollout_parts.play_group,
            engine=self._engine,
            tasks=self._tasks,
            buffer=buffer,
            breaker=self._breaker,
            wait_graph=self._wait_graph,
        )
        return LoopParts(
            session=session,
            buffer=buffer,
            rollouts=rollouts,
            tasks=self._tasks,
            journal=self._journal,
            engine=self._engine,
            ess_guard=guard,
            canaries=self._rollout_parts.canaries,
        )

    def _replay_after(self, trained: Sequence[TrajectoryGroup]) -> Replay | None:
        """The run's replay once these groups were trained."""
        if (replay := Replay.of(self._config)) is not None:
            replay.add(trained)
        return replay

    async def _record_lost_steps(self, resumed: Resumption) -> None:
        """Record the steps that the learner made and saved while everything else died before they were recorded."""
        for step, groups in resumed.unrecorded.items():
            if (replay := self._replay_after(self._journal.trained_until(step - 1))) is not None:
                groups, _ = replay.batch(step, groups)
            self._metrics.log("step", step, rollout_metrics(groups))
            await asyncio.to_thread(self._run.write_trajectories, step, groups)
            if resumed.state is not None:
                self._journal.step_made(step, replace(resumed.state, times=None), resumable_from=None)

    async def _record(self, report: StepReport, batch: Batch) -> None:
        step = report.step
        made_before = step <= self._recorded
        self._observer.step(replace(report, made_before=made_before))
        if made_before:
            return  # only the first record counts the groups that were dropped for it
        self._metrics.log("step", step, report.metrics)
        with self._wait_graph.waiting("training loop", on="disk", what="a step's episodes"):
            await asyncio.to_thread(self._run.write_trajectories, step, batch.groups)


async def _run_both(rollouts: RolloutLoop, loop: TrainingLoop) -> str:
    """Run the rollouts as long as the training loop; returns its result. Raises the error that ended either."""
    try:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(rollouts.run(), name="rollouts")
            note = await loop.run()
            playing.cancel()
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return note
