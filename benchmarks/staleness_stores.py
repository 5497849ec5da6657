"""What stands between engines and learner in the simulation: the project's buffer under each rule, and its rival.

Independent of how long anything takes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Literal, Protocol

from agentrl.buffer.journal import GroupState, Journal
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.testing import one_token_group
from agentrl.types import Task

Rule = Literal["drop", "requeue", "wait", "finish", "oversample", "tail", "capacity"]
RULES: tuple[Rule, ...] = ("drop", "requeue", "wait", "finish", "oversample", "tail", "capacity")
OVERSAMPLE = {"oversample": 2.0, "tail": 1.25}
"""Of the rules that need max_lag 0."""
_ON_STALE: Mapping[Rule, OnStale] = {"requeue": "requeue", "wait": "wait", "finish": "finish", "oversample": "finish"}


class Store(Protocol):
    """The store between engines and learner."""

    @property
    def version(self) -> int:
        """The version that the engines hold."""

    async def admit(self) -> tuple[int, Task]:
        """Wait until a group may start; its task."""

    async def finish(self, group_id: int, *, version: int, is_useless: bool) -> None:
        """A group is played; `version` is that of its first token."""

    async def take(self) -> list[tuple[int, int]]:
        """Wait for a batch: group ids and their lags."""

    async def commit(self, version: int) -> None:
        """The step is made, the engines hold `version`."""

    def pop_stale(self) -> list[int]:
        """Groups that got too old since the last call."""

    def pop_restarted(self) -> list[int]:
        """Groups that a batch ended since the last call."""


class _Fates(Journal):
    """In memory; says which groups got too old."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.stale_ids: list[int] = []

    def ended(self, group_id: int, state: GroupState, reason: str | None = None, *, again: Task | None = None) -> None:
        """See Journal."""
        super().ended(group_id, state, reason, again=again)
        if state is GroupState.DROPPED_STALE:
            self.stale_ids.append(group_id)


class _Tasks:
    """An endless stream of new tasks; returned ones come first."""

    def __init__(self) -> None:
        self.returned: deque[Task] = deque()
        self._numbers = itertools.count()

    def draw(self) -> tuple[Task, int]:
        """See TrajectoryBuffer.admit."""
        task = self.returned.popleft() if self.returned else Task(id=str(next(self._numbers)), prompt="", answer="")
        return task, 0


class OurStore:
    """agentrl/buffer/trajectory_buffer.py with its journal in memory."""

    def __init__(self, groups_per_step: int, *, max_lag: float, rule: Rule) -> None:
        self._journal = _Fates()
        self._tasks = _Tasks()
        self._playing: dict[int, Task] = {}
        self._buffer = TrajectoryBuffer(
            StalenessRule(
                groups_per_step=groups_per_step,
                max_lag=max_lag,
                on_stale=_ON_STALE.get(rule, "drop"),
                oversample=OVERSAMPLE.get(rule, 1.0),
                restarts=rule == "tail",
            ),
            journal=self._journal,
            requeue=self._tasks.returned.append,
        )

    @property
    def version(self) -> int:
        """See Store."""
        return self._buffer.version

    async def admit(self) -> tuple[int, Task]:
        """See Store."""
        group_id, task = await self._buffer.admit(self._tasks.draw)
        self._playing[group_id] = task
        return group_id, task

    async def finish(self, group_id: int, *, version: int, is_useless: bool) -> None:
        """See Store."""
        rewards, task = (0.0, 0.0 if is_useless else 1.0), self._playing.pop(group_id)
        await self._buffer.finish(one_token_group(group_id, task=task, versions=(version, version), rewards=rewards))

    async def take(self) -> list[tuple[int, int]]:
        """See Store."""
        batch = await self._buffer.take()
        return [(group.group_id, batch.policy_version - group.policy_version) for group in batch.groups]

    async def commit(self, version: int) -> None:
        """See Store."""
        await self._buffer.commit(version)

    def pop_stale(self) -> list[int]:
        """See Store."""
        stale_ids, self._journal.stale_ids = self._journal.stale_ids, []
        return stale_ids

    def pop_restarted(self) -> list[int]:
        """See Store."""
        return self._buffer.pop_restarted()


class CapacityStore:
    """The capacity formula, finished first trained first."""

    def __init__(self, groups_per_step: int, *, max_lag: float) -> None:
        self.version = 0
        self._batch = groups_per_step
        self._max_lag = max_lag
        self._counted = 0  # accepted and running
        self._tasks = _Tasks()
        self._ready: deque[tuple[int, int]] = deque()
        self._changed = asyncio.Condition()

    async def admit(self) -> tuple[int, Task]:
        """See Store."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._counted < (self.version + self._max_lag + 1) * self._batch)
            self._counted += 1
            task, _ = self._tasks.draw()
            return int(task.id), task

    async def finish(self, group_id: int, *, version: int, is_useless: bool) -> None:
        """See Store."""
        async with self._changed:
            if is_useless:
                self._counted -= 1
            else:
                self._ready.append((group_id, version))
            self._changed.notify_all()

    async def take(self) -> list[tuple[int, int]]:
        """See Store."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= self._batch)
            return [(group_id, self.version - v) for group_id, v in (self._ready.popleft() for _ in range(self._batch))]

    async def commit(self, version: int) -> None:
        """See Store."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    def pop_stale(self) -> list[int]:
        """See Store."""
        return []

    def pop_restarted(self) -> list[int]:
        """See Store."""
        return []
