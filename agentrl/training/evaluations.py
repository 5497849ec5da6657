"""The evaluations of a run: training waits for each, or it goes on while spare engines play with the version measured.

Every number is stored under the version that was measured. Independent of how steps are made (training_loop.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.buffer.journal import Journal
from agentrl.config import Config
from agentrl.engine.base import Engine, TrainableEngine
from agentrl.errors import WeightsWanted, WeightSyncError, raise_first
from agentrl.report.evaluation import Evaluation, HeldOutSet, evaluate_sets
from agentrl.report.metrics import MetricsLog
from agentrl.report.observer import Observer
from agentrl.report.statistics import EvalResult
from agentrl.run_folder import RunFolder
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.training.pinned_weights import KeptWeights, linked
from agentrl.types import WeightsRef

log = logging.getLogger(__name__)

SPARE = "engine for evaluations"
"""What the wait graph calls the spare engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareEngines:
    """Engines that only evaluate, whose weights stay the same during an evaluation, and who plays with them.

    Example: `SpareEngines(engine=VLLMEngine(url), held_out=[held_out])`.
    """

    engine: TrainableEngine
    held_out: Sequence[HeldOutSet[Engine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Where the numbers and the episodes of an evaluation go.

    Example: `Records(run=run, journal=journal, metrics=metrics, observer=observer)`.
    """

    run: RunFolder
    journal: Journal
    metrics: MetricsLog
    observer: Observer

    async def store(self, evaluation: Evaluation) -> None:
        """Store the measurement of one set. Until then, a run that resumes repeats it."""
        result = evaluation.result
        self.metrics.log("eval", result.policy_version, result.metrics())
        await asyncio.to_thread(
            self.run.write_trajectories,
            result.policy_version,
            evaluation.groups,
            kind="eval",
            set_name=result.set_name,
        )
        self.journal.evaluated(result)
        self.observer.evaluated(result)


class Evaluations:
    """All evaluations of one run.

    Args:
        engine: of the run, whose weights do not change while training waits.
        held_out: at least one set, played with `engine`; the run is judged by the first.
        spare: None: training waits for each evaluation.

    Example:
        async with evaluations.beside_training():
            await evaluations.measure(ref)  # returns at once where there are spare engines
            await evaluations.finish(version)
        before, after = evaluations.before_and_after(version)[0]
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        held_out: Sequence[HeldOutSet[Engine]],
        spare: SpareEngines | None,
        records: Records,
        wait_graph: WaitGraph,
    ) -> None:
        self._config = config
        self._engine = engine
        self._held_out = held_out
        self._spare = spare
        self._records = records
        self._wait_graph = wait_graph
        self._kept = KeptWeights(records.run)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self._version = -1  # that `_running` measures

    @asynccontextmanager
    async def beside_training(self) -> AsyncIterator[None]:
        """Train in this block: it owns the evaluation that runs beside it. The error of one ends the other."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._repeat_unfinished()
                yield
        except BaseExceptionGroup as errors:
            raise_first(errors)
        finally:
            self._tasks = None
        await asyncio.to_thread(self._kept.clear)

    async def measure(self, ref: WeightsRef, *, only_if_none: bool = False) -> None:
        """Measure the version that was just published on each set, once.

        With spare engines it returns as soon as the weights are kept; while they still measure an older version, this
        one is skipped. `only_if_none`: leave out the sets of which there is a measurement of any version. Raises what
        an evaluation raises, EngineError, DiskError.
        """
        if self._spare is None:
            await self._measure_here(ref.policy_version, only_if_none=only_if_none)
            return
        version = ref.policy_version
        left = self._left(self._spare.held_out, version, only_if_none=only_if_none)
        if not left or (self._is_running and self._version == version):
            return
        if self._is_running:
            log.warning(
                "the evaluation of version %d is skipped: that of version %d still runs. Raise eval.every or "
                "eval.engines, or lower eval.num_tasks",
                *(version, self._version),
            )
            self._records.metrics.log("event", version, {"eval/skipped": 1.0})
            return
        pinned = await asyncio.to_thread(linked, ref)
        self._begin(self._spare, pinned, left, is_kept=False)

    async def finish(self, version: int) -> None:
        """The last version is in the run's engines: measure it there, while the spare engines finish theirs."""
        if self._version == version:
            await self._finished()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._finished(), name="the evaluation that still runs")
                both.create_task(self._measure_here(version), name="the last evaluation")
        except BaseExceptionGroup as errors:
            raise_first(errors)

    def before_and_after(self, version: int) -> list[tuple[EvalResult, EvalResult]]:
        """Of each set the oldest measurement, and that of `version`."""
        known = self._records.journal.evaluations()
        by_set = [[one for one in known if one.set_name == held_out.name] for held_out in self._held_out]
        return [(of[0], next(one for one in of if one.policy_version == version)) for of in by_set]

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def _left(
        self, held_out: Sequence[HeldOutSet[Engine]], version: int, *, only_if_none: bool = False
    ) -> list[HeldOutSet[Engine]]:
        """The sets that are not measured yet."""
        known = self._records.journal.evaluations()
        done = {one.set_name for one in known if only_if_none or one.policy_version == version}
        return [one for one in held_out if one.name not in done]

    async def _measure_here(self, version: int, *, only_if_none: bool = False) -> None:
        """Measure the weights in the run's engines; the learner waits meanwhile, so the version is fixed."""
        if not (left := self._left(self._held_out, version, only_if_none=only_if_none)):
            return
        waiting = self._wait_graph.waiting("training loop", on="episodes", what="a held-out measurement")
        with self._wait_graph.phase(f"evaluating version {version}"), waiting:
            await self._play(left, self._engine, version, num_sequences=self._config.engine.max_running)

    def _begin(
        self, spare: SpareEngines, ref: WeightsRef, left: Sequence[HeldOutSet[Engine]], *, is_kept: bool
    ) -> None:
        assert self._tasks is not None, "outside of beside_training"
        self._version = ref.policy_version
        measuring = self._measure_beside(spare, ref, left, is_kept=is_kept)
        self._running = self._tasks.create_task(measuring, name=f"evaluation of version {ref.policy_version}")

    async def _measure_beside(
        self, spare: SpareEngines, ref: WeightsRef, left: Sequence[HeldOutSet[Engine]], *, is_kept: bool
    ) -> None:
        kept = ref if is_kept else await asyncio.to_thread(self._kept.keep, ref)
        with self._wait_graph.waiting("evaluation", on=SPARE, what="taking its version"):
            try:
                await spare.engine.update_weights(kept)
            except WeightsWanted as error:
                raise WeightSyncError(f"the evaluation of version {ref.policy_version}: {error}") from error
        await asyncio.to_thread(self._kept.drop_others, kept)
        num_sequences = self._config.eval.engines * self._config.engine.max_num_seqs
        with self._wait_graph.waiting("evaluation", on=SPARE, what="a held-out measurement"):
            await self._play(left, spare.engine, ref.policy_version, num_sequences=num_sequences)
        self._kept.evaluated()

    async def _play(
        self, left: Sequence[HeldOutSet[Engine]], engine: Engine, version: int, *, num_sequences: int
    ) -> None:
        await evaluate_sets(
            left,
            engine,
            policy_version=version,
            max_concurrent_episodes=2 * num_sequences,
            finished=self._records.store,
            progress=self._records.observer.evaluating,
        )

    async def _finished(self) -> None:
        """Wait for the evaluation that runs beside training."""
        if self._running is not None:
            waiting = self._wait_graph.waiting("training loop", on="evaluation", what="the one that still runs")
            with waiting:
                await self._running

    def _repeat_unfinished(self) -> None:
        """Begin again what a crash cut short."""
        if (ref := self._kept.unfinished()) is None:
            return
        if self._spare is None:
            log.warning(
                "the evaluation of version %d was cut short, and is not repeated: eval.engines=0", ref.policy_version
            )
        elif left := self._left(self._spare.held_out, ref.policy_version):
            self._begin(self._spare, ref, left, is_kept=True)
