"""The staleness rule: how old a group may be when the learner consumes it, and how many groups may be outstanding.

    lag = learner's version - the group's oldest version        lag <= ceil(max_lag) at consumption

There are `(max_lag + 1) * groups_per_step` slots. This number is derived, not tuned: groups are consumed oldest first,
so all that are outstanding when a group is admitted are consumed within `max_lag` further steps, and a group that
finishes in its turn is never stale. A group that others overtake while it still runs can become stale: `on_stale` of
the config drops it, issues its task again, lets the learner wait for it, or has it trained all the same (`finish`).
max_lag = 0 is exactly synchronous, unless `oversample` lets more groups be outstanding than a step consumes (APRIL,
arXiv 2509.18521): the step begins with the first that finish, and the others go on after it. With `restarts` they end
instead, and their tasks are played again (tail.py): then nothing can be too old.

max_lag may be a fraction, the asynchronous ratio alpha of ROLL Flash (arXiv 2510.11345): of a batch at most the share
alpha mod 1 has the largest lag, ceil(alpha). Slots and that share are both rounded down (ROLL rounds the slots up), so
that what finishes in its turn still has its place.

Pure: versions and counts in, answers out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from agentrl.config.rollout import OnStale, RolloutConfig
from agentrl.errors import StaleTrajectoryError


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """The bound on a run's lag, in policy versions, for a number of groups that each step consumes.

    >>> StalenessRule(groups_per_step=8, max_lag=2).num_slots()
    24
    >>> half = StalenessRule(groups_per_step=8, max_lag=0.5)
    >>> half.num_slots(), half.bound, half.num_oldest
    (12, 1, 4)
    """

    groups_per_step: int
    max_lag: float
    on_stale: OnStale = "drop"
    oversample: float = 1.0  # at max_lag 0: groups that may be outstanding, as a multiple of groups_per_step
    restarts: bool = False  # groups that are unfinished when a step begins are played again

    @classmethod
    def of(cls, config: RolloutConfig) -> StalenessRule:
        """The rule of a run."""
        return cls(
            groups_per_step=config.groups_per_step,
            max_lag=config.max_lag,
            on_stale=config.on_stale,
            oversample=config.oversample,
            restarts=config.partial == "restart",
        )

    @property
    def is_bounded(self) -> bool:
        """Whether a group can be too old."""
        return self.on_stale != "finish"

    @property
    def largest_lag(self) -> int | None:
        """The largest lag that can be trained on; None: any."""
        return self.bound if self.is_bounded else None

    @property
    def bound(self) -> int:
        """The largest lag, in whole versions."""
        return math.ceil(self.max_lag)

    @property
    def num_oldest(self) -> int:
        """Groups of one batch that may have the largest lag: all, unless max_lag is a fraction."""
        fraction = self.max_lag % 1
        return self._whole(fraction) if fraction and self.is_bounded else self.groups_per_step

    def num_slots(self, lag: float | None = None) -> int:
        """Groups that may be outstanding; `lag`: under a smaller bound. Raises ValueError outside [0, max_lag]."""
        lag = self.max_lag if lag is None else lag
        if not 0 <= lag <= self.max_lag:
            raise ValueError(f"lag {lag:g} is outside [0, {self.max_lag:g}]")
        return max(self._whole(lag + 1), math.ceil(round(self.oversample * self.groups_per_step, 6)))

    def is_stale(self, group_version: int, *, version: int) -> bool:
        """Whether a group whose oldest token is of `group_version` is too old for a learner at `version`.

        >>> rule = StalenessRule(groups_per_step=8, max_lag=2)
        >>> rule.is_stale(3, version=5), rule.is_stale(2, version=5)
        (False, True)
        """
        return self.is_bounded and version - group_version > self.bound

    def is_oldest(self, group_version: int, *, version: int) -> bool:
        """Whether it is one of those of which a batch may have only `num_oldest`."""
        return self.num_oldest < self.groups_per_step and version - group_version == self.bound

    def check(self, group_id: int, group_version: int, *, version: int) -> None:
        """Raises StaleTrajectoryError for a group that must not be consumed at `version`."""
        if self.is_stale(group_version, version=version):
            lag = version - group_version
            raise StaleTrajectoryError(f"group {group_id} has lag {lag}, allowed is {self.bound}")

    def would_strand(self, num_in_flight: Counter[int], num_ready: Counter[int], *, version: int) -> bool:
        """Whether groups in flight would become stale if the learner did not wait for them now.

        A group of version v must be consumed at v + bound or before: v + bound - `version` batches are left for it and
        for all groups that are not newer, and of the last one `num_oldest` places. Some group in flight is stranded if
        more groups than fit into these batches compete for them. With `restarts` none is: a batch ends them.

        Args:
            num_in_flight: groups still played, by version.
            num_ready: groups that a batch taken now would leave behind, by version.
            version: of the learner.
        """
        if self.restarts:
            return False
        in_flight = competing = 0
        for group_version in sorted(num_in_flight.keys() | num_ready.keys()):
            in_flight += num_in_flight[group_version]
            competing += num_in_flight[group_version] + num_ready[group_version]
            num_batches = group_version + self.bound - version
            num_places = self.groups_per_step * (num_batches - 1) + self.num_oldest if num_batches > 0 else 0
            if in_flight and competing > num_places:
                return True
        return False

    def _whole(self, batches: float) -> int:
        """The groups of so many batches, rounded down; 0.1 + 0.2 batches of 10 are 3 groups."""
        return math.floor(round(batches * self.groups_per_step, 6))
