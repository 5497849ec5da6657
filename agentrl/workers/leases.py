"""What the dispatcher knows of the groups that somebody awaits, and of the workers that have a lease.

Independent of how groups are assigned.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentrl.types import Task, TrajectoryGroup
from agentrl.workers.records import GroupKey, Play

NO_WORKER_S = 300.0
"""How long groups may wait while there is no worker at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Example: `Limits(max_episodes=1000, timeout_s=60, max_attempts=3)`."""

    max_episodes: int  # that a worker plays at once; one group is always allowed
    timeout_s: float  # silence after which a worker is given up
    max_attempts: int  # workers that a group may lose before it counts as failed
    no_worker_s: float = NO_WORKER_S


@dataclass(eq=False, kw_only=True)
class IssuedGroup:
    """A group that somebody awaits."""

    play: Play
    task: Task
    num_episodes: int
    done: asyncio.Future[TrajectoryGroup]
    worker: LeasedWorker | None = None
    num_lost: int = 0  # workers that had it and were lost


@dataclass(eq=False, kw_only=True)
class LeasedWorker:
    """A worker with a lease."""

    name: str
    lease: str
    groups: dict[GroupKey, IssuedGroup] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    silent_s: float = 0.0
    is_disconnected: bool = False
    num_tokens: int = 0
    num_beats: int = 0
    is_generating: bool = False

    @property
    def num_episodes(self) -> int:
        """Episodes that it plays."""
        return sum(group.num_episodes for group in self.groups.values())

    def lacks(self, held: frozenset[Play]) -> list[IssuedGroup]:
        """The groups that it is to play and does not."""
        return [group for group in self.groups.values() if group.play not in held]

    def should_not(self, held: frozenset[Play]) -> tuple[Play, ...]:
        """What it plays though it is not to."""
        has = {group.play for group in self.groups.values()}
        return tuple(play for play in held if play not in has)
