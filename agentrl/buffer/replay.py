"""Replay: which groups that were trained before a batch has beside its new ones (TBA, arXiv 2503.18929).

Each batch has `groups_per_step` new groups, and on average groups_per_step * (1 / recent - 1) earlier ones, drawn
uniformly from the newest `capacity` that were taken. So new groups make up the share `recent` of what is trained, and
none of them waits longer than without replay: slots and staleness stay those of staleness.py. Draws depend on the seed,
the step and the groups only: after a crash a batch is drawn again as it was.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agentrl.config import Config
from agentrl.types import TrajectoryGroup


class Replay:
    """The groups that may be trained again, and the draws from them.

    Args:
        per_step: earlier groups that a batch has on average.
        capacity: how many groups are remembered, the newest ones.
        group_size: episodes of a group that a batch has, drawn anew each time; those beyond it wait for another draw.
        seed: of the draws.

    Example:
        replay = Replay(per_step=0.5, capacity=64, group_size=8, seed=0)
        groups, num_replayed = replay.batch(step, new_groups)
    """

    def __init__(self, *, per_step: float, capacity: int, group_size: int, seed: int) -> None:
        self._per_step = per_step
        self._group_size = group_size
        self._seed = seed
        self._groups: deque[TrajectoryGroup] = deque(maxlen=capacity)

    @property
    def remembered(self) -> tuple[TrajectoryGroup, ...]:
        """The groups that may be drawn, oldest batch first."""
        return tuple(self._groups)

    @classmethod
    def of(cls, config: Config) -> Replay | None:
        """The replay of a run; None without `rollout.replay`."""
        settings, rollout = config.rollout.replay, config.rollout
        if settings is None:
            return None
        return cls(
            per_step=rollout.groups_per_step * (1 / settings.recent - 1),
            capacity=settings.capacity,
            group_size=rollout.group_size,
            seed=config.seed,
        )

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Remember the groups of earlier batches, oldest batch first; the oldest beyond the capacity are forgotten."""
        self._groups.extend(groups)

    def batch(self, step: int, new: Sequence[TrajectoryGroup]) -> tuple[tuple[TrajectoryGroup, ...], int]:
        """The batch of `step` (1, 2, ...): the new groups, then earlier ones, and how many those are.

        The new groups are remembered. Each group has `group_size` of its episodes.
        """
        again = self._drawn(step)
        self.add(new)
        return tuple(self._view(group, step) for group in (*new, *again)), len(again)

    def num_due(self, step: int) -> int:
        """Earlier groups that the batch of `step` (1, 2, ...) has: the average, over many steps.

        >>> replay = Replay(per_step=0.4, capacity=8, group_size=2, seed=0)
        >>> [replay.num_due(step) for step in (1, 2, 3, 4, 5)]
        [0, 0, 1, 0, 1]
        """
        return self._due_by(step) - self._due_by(step - 1)

    def _drawn(self, step: int) -> tuple[TrajectoryGroup, ...]:
        """Each at most once, oldest first; fewer than are due while there are fewer."""
        rng = random.Random(f"{self._seed}/replay/{step}")
        chosen = rng.sample(range(len(self._groups)), min(self.num_due(step), len(self._groups)))
        return tuple(self._groups[index] for index in sorted(chosen))

    def _view(self, group: TrajectoryGroup, step: int) -> TrajectoryGroup:
        if len(group.episodes) <= self._group_size:
            return group
        rng = random.Random(f"{self._seed}/episodes/{step}/{group.group_id}")
        chosen = sorted(rng.sample(range(len(group.episodes)), self._group_size))
        return replace(group, episodes=tuple(group.episodes[index] for index in chosen))

    def _due_by(self, step: int) -> int:
        return math.floor(round(step * self._per_step, 6))
