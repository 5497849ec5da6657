"""The rollout loop: keeps every slot of the buffer busy with a group of episodes.

Generation never waits for the learner's step; it stops only while every slot is taken. Independent of the learner, of
steps and of weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from agentrl.buffer.journal import GroupState, Outcome, SourceHistory
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.data.source import TaskSource
from agentrl.engine.base import Engine
from agentrl.errors import ErrorRateExceeded, InfraError, raise_first
from agentrl.rollouts.group import PlayGroup
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.types import Task, TrajectoryGroup

log = logging.getLogger(__name__)


class VersionedTaskSource:
    """The task source, which gets the outcomes of finished groups only when the policy version changes.

    So the task that comes next never depends on the order in which groups finish.

    Example:
        task, cursor = tasks.draw()
        tasks.finished(group, admitted=3)  # counts once the engines hold version 4:
        tasks.committed(4)
    """

    def __init__(self, source: TaskSource, history: SourceHistory) -> None:
        """`history`: the tasks that the run has already drawn, and their outcomes."""
        self.source = source
        self._outcomes = list(history.outcomes)
        source.skip(history.cursor)
        for task in history.returned:
            source.give_back(task)

    def draw(self) -> tuple[Task, int]:
        """The next task, and the number of rows drawn by then."""
        task = self.source.next()
        return task, self.source.cursor

    def finished(self, group: TrajectoryGroup, *, admitted: int) -> None:
        """A group that was admitted at version `admitted` is finished."""
        rewards = tuple(group.episode_rewards)
        self._outcomes.append(
            Outcome(group_id=group.group_id, task_id=group.task.id, admitted=admitted, rewards=rewards)
        )

    def committed(self, version: int) -> None:
        """The engines hold `version`: pass on the outcomes of the groups that were admitted before it."""
        counts = [outcome for outcome in self._outcomes if outcome.admitted < version]
        self._outcomes = [outcome for outcome in self._outcomes if outcome.admitted >= version]
        for outcome in sorted(counts, key=lambda outcome: outcome.group_id):
            self.source.observe(outcome.task_id, outcome.rewards)


class ErrorBreaker:
    """Ends a run whose parts fail too often, instead of letting it train on the few groups that still finish.

    Args:
        max_rate: share of the last `window` groups that may fail for infrastructure reasons.
        min_failures: failures that never end the run, so that one early failure does not.

    Example:
        breaker.success()
        breaker.failure(EngineError("connection refused"))  # raises ErrorRateExceeded once there are too many
    """

    def __init__(self, max_rate: float, *, window: int = 100, min_failures: int = 5) -> None:
        self._max_rate = max_rate
        self._min_failures = min_failures
        self._outcomes: deque[type[InfraError] | None] = deque(maxlen=window)  # class of the failure; None: finished
        self._first_error: InfraError | None = None

    def success(self) -> None:
        """A group finished."""
        self._outcomes.append(None)

    def failure(self, error: InfraError) -> None:
        """A group failed finally. Raises ErrorRateExceeded, caused by the first failure, when there are too many."""
        self._outcomes.append(type(error))
        self._first_error = self._first_error or error
        kinds = Counter(kind.__name__ for kind in self._outcomes if kind is not None)
        num_failed = kinds.total()
        if num_failed > max(self._min_failures, self._max_rate * len(self._outcomes)):
            counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
            raise ErrorRateExceeded(
                f"{num_failed} of the last {len(self._outcomes)} groups failed for infrastructure reasons ({counts}), "
                f"more than rollout.max_infra_error_rate={self._max_rate} allows. The first failure: "
                f"{self._first_error}"
            ) from self._first_error


class RolloutLoop:
    """Plays groups, one per free slot, until cancelled.

    Example:
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(rollouts.run(), name="rollouts")
    """

    def __init__(
        self,
        play_group: PlayGroup[Engine],
        *,
        engine: Engine,
        tasks: VersionedTaskSource,
        buffer: TrajectoryBuffer,
        breaker: ErrorBreaker,
        wait_graph: WaitGraph,
    ) -> None:
        self._play_group = play_group
        self._engine = engine
        self._tasks = tasks
        self._buffer = buffer
        self._breaker = breaker
        self._wait_graph = wait_graph
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._finished: list[TrajectoryGroup] = []
        self._slot_wait_s = 0.0

    async def run(self) -> None:
        """Play the groups that a crash interrupted, then new tasks, without end. Raises the error that ended it."""
        try:
            async with asyncio.TaskGroup() as groups:
                for group_id, task in (await self._buffer.caught_up()).items():
                    self._play(groups, group_id, task)
                while True:
                    asked = time.monotonic()
                    with self._wait_graph.waiting("rollouts", on="training loop", what="a free slot", moves=False):
                        group_id, task = await self._buffer.admit(self._tasks.draw)
                    self._slot_wait_s += time.monotonic() - asked
                    self._play(groups, group_id, task)
        except BaseExceptionGroup as errors:
            raise_first(errors)

    def stop(self, group_ids: Iterable[int]) -> None:
        """End these groups unfinished; the buffer has given them up already."""
        for group_id in group_ids:
            if (playing := self._playing.get(group_id)) is not None:
                playing.cancel()

    def pop_finished(self) -> Sequence[TrajectoryGroup]:
        """The groups finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pop_slot_wait_s(self) -> float:
        """Seconds spent waiting for a slot since the last call."""
        seconds, self._slot_wait_s = self._slot_wait_s, 0.0
        return seconds

    def _play(self, groups: asyncio.TaskGroup, group_id: int, task: Task) -> None:
        playing = self._one_group(group_id, task, admitted=self._buffer.version)
        self._playing[group_id] = groups.create_task(playing, name=f"group {group_id}")
        self._playing[group_id].add_done_callback(lambda _: self._playing.pop(group_id))

    async def _one_group(self, group_id: int, task: Task, *, admitted: int) -> None:
        try:
            with self._wait_graph.waiting("rollouts", on="episodes", what="a group"):
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
        self._tasks.finished(group, admitted=admitted)
        await self._buffer.finish(group)
