"""One run of the benchmark in simulated time: the project's own buffer, the waits of the real runs, assumed costs.

predict.py calls it where a closed form is missing. What it simulates: the slots and the staleness rule
(agentrl/buffer/trajectory_buffer.py itself), replaced groups, the order of step, publication and admission of
agentrl/training/training_loop.py, waits of waits.py, and two cores that rollouts and learner share (cores.py). What it
leaves out: learning (the share of equal rewards is a constant), failures, the time in which engines take weights, and
everything by which an episode's work depends on its length.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from agentrl.buffer.journal import GroupState, Journal
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.testing import one_token_group
from agentrl.types import Task
from benchmarks import virtual_time
from benchmarks.asynchrony.arms import Arm
from benchmarks.asynchrony.cores import Cores
from benchmarks.asynchrony.costs import GROUPS, Costs, has_equal_rewards, members_of
from envs.modmath import ModMath


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An arm as the simulation sees it."""

    max_lag: float = 0.0
    on_stale: OnStale = "drop"
    oversample: float = 1.0
    replaces_equal: bool = True
    streams: bool = False
    """The learner computes with each group as it finishes."""
    is_tail_batched: bool = False
    """Groups that a step did not wait for end, and their tasks have a step of their own."""
    is_drained: bool = False
    """New weights wait for the groups in flight, and new groups for the weights."""
    is_split: bool = False
    """Learner and rollouts have half of the cores each."""
    learner_threads: int = 1

    @classmethod
    def of(cls, arm: Arm) -> Policy:
        """From the arm's config."""
        settings = arm.settings
        return cls(
            max_lag=float(settings.get("rollout.max_lag", 2)),
            on_stale=cast(OnStale, settings.get("rollout.on_stale", "drop")),
            oversample=float(settings.get("rollout.oversample", 1)),
            replaces_equal=arm.replaces,
            streams=bool(settings.get("learner.stream_groups", False)),
            is_tail_batched=settings.get("rollout.partial") == "restart",
            is_drained=arm.is_drained,
            is_split=arm.is_split,
            learner_threads=int(settings.get("learner.num_threads", 1)),
        )


@dataclass(kw_only=True)
class Outcome:
    """What one simulated run did. `steps` has the keys of a record's steps (see benchmarks/asynchrony/run.py)."""

    steps: list[dict[str, float]] = field(default_factory=list)
    useful: list[int] = field(default_factory=list)
    """Trained groups whose rewards differ, a step."""
    finished_waits_s: list[float] = field(default_factory=list)
    """Wait of each finished episode."""
    trained_waits_s: list[float] = field(default_factory=list)
    num_restarted: int = 0
    core_s: dict[str, float] = field(default_factory=dict)
    learner_busy_s: float = 0.0


class _Fates(Journal):
    def __init__(self) -> None:
        super().__init__(":memory:")
        self.stale_ids: list[int] = []

    def ended(self, group_id: int, state: GroupState, reason: str | None = None, *, again: Task | None = None) -> None:
        super().ended(group_id, state, reason, again=again)
        if state is GroupState.DROPPED_STALE:
            self.stale_ids.append(group_id)


class Run:
    """One arm, one seed, one sigma.

    Example: `virtual_time.run(Run(policy, costs, sigma=1.0, seed=0, num_steps=30).run())`.
    """

    def __init__(self, policy: Policy, costs: Costs, *, sigma: float, seed: int, num_steps: int) -> None:
        self._policy, self._costs, self._sigma, self._num_steps = policy, costs, sigma, num_steps
        self._tasks: Iterator[Task] = iter(ModMath.tasks("train", seed=seed))
        self._num_drawn = itertools.count(1)
        self._again: deque[Task] = deque()
        self._fates = _Fates()
        rule = StalenessRule(
            groups_per_step=GROUPS,
            max_lag=policy.max_lag,
            on_stale=policy.on_stale,
            oversample=policy.oversample,
            restarts=policy.is_tail_batched,
        )
        self._buffer = TrajectoryBuffer(
            rule,
            journal=self._fates,
            drop_zero_variance=policy.replaces_equal,
            requeue=self._again.append,
        )
        self._cores = Cores(
            costs.cores,
            learner=costs.learner_cores(policy.learner_threads),
            rollouts=costs.rollout_cores,
            one_rollout=min(1.0, costs.episode_core_s / costs.episode_alone_s),
            is_split=policy.is_split,
        )
        self._engine_version = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._none_in_flight = asyncio.Event()
        self._num_in_flight = 0
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._group_tasks: dict[int, Task] = {}
        self._group_waits: dict[int, list[float]] = {}
        self._streamed: asyncio.Queue[None] = asyncio.Queue()
        self._outcome = Outcome()
        self._finished = self._equal = 0

    async def run(self) -> Outcome:
        """Play until the last step."""
        rollouts = asyncio.create_task(self._roll())
        streaming = asyncio.create_task(self._stream()) if self._policy.streams else None
        publication: asyncio.Task[None] | None = None
        now = asyncio.get_running_loop().time
        for version in range(1, self._num_steps + 1):
            asked, busy_s = now(), self._cores.busy_s
            batch = await self._buffer.take()
            taken = now()
            await self._end_restarted()
            self._cores.pause(self._policy.oversample > 1)  # until the new weights are there
            if self._policy.streams:
                await self._streamed.join()
            else:
                await self._cores.learn(self._costs.learner_step_one_core_s)
            learned = now()
            await self._buffer.stepped(version)
            if publication:
                await publication
            publication = asyncio.create_task(self._publish(version))
            lags = [batch.policy_version - group.policy_version for group in batch.groups]
            ids = [group.group_id for group in batch.groups]
            step = {"version": version, "wait_batch_s": taken - asked, "learner_step_s": learned - taken}
            self._note(step, lags, ids, busy_s)
            if self._policy.max_lag == 0:
                await publication
        await publication  # type: ignore[misc]
        for task in [rollouts, streaming]:
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._outcome.learner_busy_s = self._cores.learner_busy_s
        self._outcome.core_s = {"engine": self._cores.rollout_core_s, "learner": self._cores.learner_core_s}
        return self._outcome

    async def _publish(self, version: int) -> None:
        if self._policy.is_drained:
            self._gate.clear()
            while self._num_in_flight:
                self._none_in_flight.clear()
                await self._none_in_flight.wait()
        await asyncio.sleep(self._costs.publish_s)
        self._engine_version = version
        self._gate.set()
        self._cores.pause(False)
        await self._buffer.commit(version)
        at_s = asyncio.get_running_loop().time()
        self._outcome.steps[version - 1].update(at_s=at_s, real_s=at_s, publish_s=self._costs.publish_s)

    def _note(self, step: dict[str, float], lags: list[int], ids: list[int], busy_s: float) -> None:
        waits = [seconds for group_id in ids for seconds in self._group_waits[group_id]]
        self._outcome.trained_waits_s += waits
        self._outcome.useful.append(
            sum(not has_equal_rewards(self._group_tasks[group_id].id, self._costs) for group_id in ids)
        )
        stale, self._fates.stale_ids = len(self._fates.stale_ids), []
        seconds = step["wait_batch_s"] + step["learner_step_s"]
        step |= {
            "lag_mean": statistics.fmean(lags),
            "lag_max": max(lags),
            "groups_finished": self._finished,
            "groups_equal": self._equal,
            "groups_stale": stale,
            "trained_wait_s_mean": statistics.fmean(waits),
            "engine_busy_share": min(1.0, (self._cores.busy_s - busy_s) / seconds) if seconds else 0.0,
        }
        self._finished = self._equal = 0
        self._outcome.steps.append(step)

    def _draw(self) -> tuple[Task, int]:
        task = self._again.popleft() if self._again else next(self._tasks)
        return task, next(self._num_drawn)

    async def _roll(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                group_id, task = await self._buffer.admit(self._draw)
                self._group_tasks[group_id] = task
                self._playing[group_id] = groups.create_task(self._group(group_id, task))

    async def _group(self, group_id: int, task: Task) -> None:
        members = members_of(task.id, self._costs, sigma=self._sigma)
        await self._gate.wait()
        self._num_in_flight += 1
        try:
            versions = await asyncio.gather(*(self._episode(member) for member in members))
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._none_in_flight.set()
        self._playing.pop(group_id, None)
        waits = [sum(member) for member in members]
        self._group_waits[group_id] = waits
        self._outcome.finished_waits_s += waits
        is_equal = has_equal_rewards(task.id, self._costs)
        self._finished += 1
        self._equal += is_equal
        if self._policy.streams and not (is_equal and self._policy.replaces_equal):
            self._streamed.put_nowait(None)
        rewards = (0.0, 0.0) if is_equal else (0.0, 1.0)
        group = one_token_group(group_id, versions=(min(versions),) * 2, rewards=rewards, task=task)
        await self._buffer.finish(group)

    async def _episode(self, waits_s: tuple[float, ...]) -> int:
        turn_core_s = self._costs.episode_core_s / (self._costs.mean_calls + 1)
        version = self._engine_version
        await self._cores.roll(turn_core_s)
        for seconds in waits_s:
            await asyncio.sleep(seconds)
            await self._cores.roll(turn_core_s)
        return version

    async def _stream(self) -> None:
        """Compute with each group as it finishes."""
        while True:
            await self._streamed.get()
            await self._cores.learn(self._costs.learner_step_one_core_s / GROUPS)
            self._streamed.task_done()

    async def _end_restarted(self) -> None:
        """Tail batching: end what the step did not wait for."""
        for group_id in self._buffer.pop_restarted():
            self._outcome.num_restarted += 1
            if group := self._playing.pop(group_id, None):
                group.cancel()
                await asyncio.gather(group, return_exceptions=True)


def simulate(policy: Policy, costs: Costs, *, sigma: float, seed: int, num_steps: int) -> Outcome:
    """One run in simulated time."""

    async def run() -> Outcome:
        return await Run(policy, costs, sigma=sigma, seed=seed, num_steps=num_steps).run()

    return virtual_time.run(run())
