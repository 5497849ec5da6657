"""The dispatcher: hands groups out to rollout workers, and issues them again when a worker is lost.

To the rest of the run it is a PlayGroup: journal, admission, breaker and ledger know nothing of workers. A group has
one attempt at a time; only the result of that attempt, from the worker that has it, counts. Independent of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count

from agentrl.engine.base import Engine, EngineState, SharedEngines
from agentrl.engine.metered import MeteredEngine
from agentrl.errors import EngineError, InfraError, RunOver, WeightsWanted, WorkerExpired, WorkerLost, raise_first
from agentrl.rollouts.group import PlayGroup
from agentrl.run_folder import EpisodeKind
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.types import Task, TrajectoryGroup
from agentrl.workers.leases import IssuedGroup, LeasedWorker, Limits
from agentrl.workers.records import PARK_S, Assignment, EngineFailure, GroupKey, Joining, Orders, Play, Report, Result

log = logging.getLogger(__name__)

TICK_S = 0.02
"""Between two looks at engines and leases."""
DISCONNECTED_S = 5.0
"""How long a worker may be silent after its connection broke: its process has most likely ended."""


class Dispatcher:
    """Plays groups on workers, which join and leave at any time.

    Args:
        engines: that the workers generate with.
        group_sizes: episodes of one group of each kind.
        wait_graph: records the waits, and the movements that the workers report.

    Example:
        async with dispatcher.running():
            group = await dispatcher.play_group(engine, 7, task, kind="train")
    """

    def __init__(
        self,
        engines: SharedEngines,
        limits: Limits,
        *,
        group_sizes: Mapping[EpisodeKind, int],
        wait_graph: WaitGraph | None = None,
    ) -> None:
        self._engines = engines
        self._limits = limits
        self._group_sizes = group_sizes
        self._wait_graph = wait_graph or WaitGraph()
        self._metered: MeteredEngine | None = None
        self._workers: dict[str, LeasedWorker] = {}
        self._waiting: deque[IssuedGroup] = deque()
        self._groups: dict[GroupKey, IssuedGroup] = {}
        self._states: tuple[EngineState, ...] = engines.states()
        self._num_checks = [0] * len(self._states)
        self._to_check: dict[int, asyncio.Task[None]] = {}
        self._revision = 0
        self._numbers = count()
        self._joined = asyncio.Event()
        self._is_over = False
        self._alone_s = 0.0  # groups wait and there is no worker
        self._tasks: asyncio.TaskGroup
        self.num_lost = 0
        """Workers that were given up so far."""
        self.num_refused = 0
        """Results so far of attempts that had been issued again."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch leases and engines while the block runs. Raises InfraError when there is no worker for too long."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                ticking = self._tasks.create_task(self._tick_forever(), name="leases of the rollout workers")
                try:
                    yield
                finally:
                    self.end()
                    for check in self._to_check.values():
                        check.cancel()
                    ticking.cancel()
        except BaseExceptionGroup as errors:
            raise_first(errors)

    def end(self) -> None:
        """The run is over: tell the workers. From now on none of them counts as lost."""
        self._is_over = True
        self._wake_all()

    @property
    def engine_states(self) -> tuple[EngineState, ...]:
        """What the workers were last told of the engines."""
        return self._states

    def measure_with(self, engine: MeteredEngine) -> None:
        """Count the workers' tokens and busy seconds as those of `engine`."""
        self._metered = engine

    async def joined(self) -> None:
        """Return once a worker has joined."""
        await self._joined.wait()

    @property
    def names(self) -> list[str]:
        """The workers that have a lease."""
        return sorted(worker.name for worker in self._workers.values())

    def load(self) -> dict[str, int]:
        """Episodes that each worker has."""
        return {worker.name: worker.num_episodes for worker in self._workers.values()}

    async def play_group(self, engine: Engine, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        """See PlayGroup; the workers have engine clients of their own. Raises WorkerLost after too many workers."""
        play = Play(kind=kind, group_id=group_id, number=next(self._numbers))
        return await self._played(play, task, num_episodes=self._group_sizes[kind])

    def of_set(self, name: str, *, num_plays: int, is_spare: bool = False) -> PlayGroup[Engine]:
        """Plays the tasks of a held-out set, `num_plays` times each; `is_spare`: on the engines that only evaluate."""

        async def play_group(engine: Engine, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
            number = next(self._numbers)
            play = Play(kind=kind, group_id=group_id, number=number, set_name=name, is_spare=is_spare)
            return await self._played(play, task, num_episodes=num_plays)

        return play_group

    async def _played(self, play: Play, task: Task, *, num_episodes: int) -> TrajectoryGroup:
        done: asyncio.Future[TrajectoryGroup] = asyncio.get_running_loop().create_future()
        group = IssuedGroup(play=play, task=task, num_episodes=num_episodes, done=done)
        assert play.key not in self._groups, f"group {play.group_id} is played twice"
        self._groups[play.key] = group
        self._waiting.append(group)
        try:
            with self._wait_graph.waiting("episodes", on="rollout workers", what="a group"):
                self._assign()
                return replace(await group.done, task=task)
        finally:
            del self._groups[play.key]
            self._take_back(group)
            self._assign()

    def join(self, joining: Joining) -> str:
        """The lease of a new worker. A worker of the same name is given up: this is its successor."""
        for worker in list(self._workers.values()):
            if worker.name == joining.name:
                self._lose(worker, "it was started again")
        worker = LeasedWorker(name=joining.name, lease=uuid.uuid4().hex)
        self._workers[worker.lease] = worker
        self._joined.set()
        self._assign()
        return worker.lease

    async def orders(self, report: Report) -> Orders:
        """What the worker is to do, as soon as it differs from what it does, at the latest after PARK_S.

        Raises WorkerExpired, RunOver.
        """
        worker = self._seen(report.lease)
        self._measure(worker, report)
        held = frozenset(report.held)
        with suppress(TimeoutError):
            async with asyncio.timeout(PARK_S):
                while not self._is_over and report.revision == self._revision:
                    if worker.lacks(held) or worker.should_not(held):
                        break
                    worker.woken.clear()
                    await worker.woken.wait()
        worker = self._seen(report.lease)
        if self._is_over:
            raise RunOver("the run is over")
        self._look()  # what was committed before a group was handed out is in the same orders
        return Orders(
            revision=self._revision,
            engines=self._states,
            assignments=tuple(Assignment(play=group.play, task=group.task) for group in worker.lacks(held)),
            cancelled=worker.should_not(held),
        )

    def alive(self, lease: str) -> None:
        """The worker's episodes move, though it may be too busy to ask for orders. Raises WorkerExpired."""
        self._seen(lease)
        self._wait_graph.beat("rollout workers")

    def result(self, result: Result) -> None:
        """The end of a play. Repeating the call is safe; a result of an earlier attempt is ignored.

        Raises WorkerExpired where the lease has ended.
        """
        self.num_refused += result.lease not in self._workers
        worker = self._seen(result.lease)
        group = self._groups.get(result.play.key)
        if group is None:
            return  # it was cancelled, or the result is repeated
        if group.worker is not worker or group.play != result.play:
            self.num_refused += 1
            return
        self._wait_graph.beat("rollout workers")
        del worker.groups[result.play.key]
        group.worker = None
        if group.done.done():
            return
        if result.group is not None and result.group.group_id == result.play.group_id:
            group.done.set_result(result.group)
        elif result.error is not None:
            group.done.set_exception(result.error.as_exception(worker.name))
        else:
            group.done.set_exception(
                WorkerLost(f"{worker.name} sent neither group {result.play.group_id} nor an error")
            )

    def engine_failed(self, failure: EngineFailure) -> None:
        """A worker's request to an engine failed: look at it, unless that has been done since. Raises WorkerExpired."""
        worker, index = self._seen(failure.lease), failure.index
        if not 0 <= index < len(self._states) or index in self._to_check:
            return
        if failure.num_checks == self._num_checks[index] and not self._is_over:
            url = self._states[index].url
            log.warning("%s: a request to the engine at %s failed: %s", worker.name, url, failure.message)
            self._to_check[index] = self._tasks.create_task(self._check(index), name=f"look at engine {index}")

    def leave(self, lease: str, reason: str) -> None:
        """The worker ends."""
        if (worker := self._workers.get(lease)) is not None:
            self._lose(worker, reason)

    def disconnected(self, lease: str) -> None:
        """The connection of the worker's call for orders broke."""
        if (worker := self._workers.get(lease)) is not None:
            worker.is_disconnected = True

    def _seen(self, lease: str) -> LeasedWorker:
        if (worker := self._workers.get(lease)) is None:
            raise WorkerExpired("the orchestrator gave this worker up, and its groups are played elsewhere: join again")
        worker.silent_s, worker.is_disconnected = 0.0, False
        return worker

    def _measure(self, worker: LeasedWorker, report: Report) -> None:
        if report.num_beats > worker.num_beats:
            self._wait_graph.beat("rollout workers")
        if self._metered is not None:
            self._metered.num_tokens += max(0, report.num_tokens - worker.num_tokens)
            if report.is_generating != worker.is_generating:
                (self._metered.busy.start if report.is_generating else self._metered.busy.stop)()
                worker.is_generating = report.is_generating
        worker.num_beats, worker.num_tokens = report.num_beats, report.num_tokens
        if report.late_s > self._limits.timeout_s / 10:
            log.warning(
                "%s: its event loop was %.1f s late: code of the environment blocks it, or computes for many episodes. "
                "Put blocking work into `await asyncio.to_thread(...)`; more rollout.workers share computing",
                *(worker.name, report.late_s),
            )

    def _assign(self) -> None:
        """Give each waiting group to the worker with the fewest episodes, as far as there is room."""
        while self._waiting and self._workers:
            group = self._waiting[0]
            if group.done.done():
                self._waiting.popleft()
                continue
            worker = min(self._workers.values(), key=lambda worker: worker.num_episodes)
            if worker.groups and worker.num_episodes + group.num_episodes > self._limits.max_episodes:
                return
            self._waiting.popleft()
            group.worker = worker
            worker.groups[group.play.key] = group
            worker.woken.set()

    def _take_back(self, group: IssuedGroup) -> None:
        """Nobody awaits the group any more."""
        if group.worker is not None:
            group.worker.groups.pop(group.play.key, None)
            group.worker.woken.set()
            group.worker = None
        elif group in self._waiting:
            self._waiting.remove(group)

    def _lose(self, worker: LeasedWorker, reason: str) -> None:
        """End the lease. The worker's groups are issued again, before those that wait already."""
        del self._workers[worker.lease]
        self.num_lost += not self._is_over
        if worker.is_generating and self._metered is not None:
            self._metered.busy.stop()
        groups = [group for group in worker.groups.values() if not group.done.done()]
        if not self._is_over:
            log.warning("%s was lost: %s. Its %d groups are played again", worker.name, reason, len(groups))
        for group in reversed(groups):
            group.worker = None
            group.play = replace(group.play, number=next(self._numbers))
            group.num_lost += 1
            if group.num_lost < self._limits.max_attempts:
                self._waiting.appendleft(group)
            else:
                group.done.set_exception(
                    WorkerLost(
                        f"group {group.play.group_id} (task {group.task.id}) lost {group.num_lost} rollout "
                        f"workers; the last was {worker.name}: {reason}"
                    )
                )
        worker.groups.clear()
        worker.woken.set()
        self._assign()

    async def _check(self, index: int) -> None:
        try:
            await self._engines.check(index)
        except (EngineError, WeightsWanted) as error:
            log.warning("the engine at %s does not serve: %s", self._states[index].url, error)
        finally:
            self._num_checks[index] += 1
            del self._to_check[index]
        self._look()

    async def _tick_forever(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            # Time in which this process itself did not run is not the workers' silence.
            self._tick(min(now - before, 10 * TICK_S))
            before = now

    def _tick(self, seconds: float) -> None:
        self._look()
        for worker in list(self._workers.values()):
            worker.silent_s += seconds
            if worker.silent_s > self._limits.timeout_s:
                self._lose(worker, f"it was silent for {worker.silent_s:.0f} s (rollout.worker_timeout_s)")
            elif worker.is_disconnected and worker.silent_s > DISCONNECTED_S:
                self._lose(worker, "its connection broke, and it did not return")
        self._alone_s = self._alone_s + seconds if self._groups and not self._workers else 0.0
        if self._alone_s > self._limits.no_worker_s:
            raise InfraError(
                f"no rollout worker for {self._alone_s:.0f} s, and {len(self._groups)} groups wait for one: start "
                "`agentrl rollout-worker`, or set rollout.workers"
            )

    def _look(self) -> None:
        """Notice what has changed about the engines."""
        states = tuple(
            replace(state, num_checks=number)
            for state, number in zip(self._engines.states(), self._num_checks, strict=True)
        )
        if states != self._states:
            self._states, self._revision = states, self._revision + 1
            self._wake_all()

    def _wake_all(self) -> None:
        for worker in self._workers.values():
            worker.woken.set()
