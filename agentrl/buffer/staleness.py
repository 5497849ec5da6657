"""The staleness rule: how old a group may be when the learner consumes it, and how many groups may be outstanding.

    lag = learner's version - the group's oldest version        lag <= max_lag at consumption

There are `(max_lag + 1) * groups_per_step` slots. This number is derived, not tuned: groups are consumed oldest first,
so all that are outstanding when a group is admitted are consumed within `max_lag` further steps, and a group that
finishes in its turn is never stale. A group that others overtake while it still runs can become stale: `on_stale` of
the config drops it, issues its task again, or lets the learner wait for it. max_lag = 0 is exactly synchronous.

Pure: versions and counts in, answers out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from agentrl.errors import StaleTrajectoryError


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """The bound on a run's lag, in policy versions, for a number of groups that each step consumes.

    >>> StalenessRule(groups_per_step=8, max_lag=2).num_slots()
    24
    """

    groups_per_step: int
    max_lag: int

    def num_slots(self, lag: int | None = None) -> int:
        """Groups that may be outstanding; `lag`: under a smaller bound. Raises ValueError outside [0, max_lag]."""
        lag = self.max_lag if lag is None else lag
        if not 0 <= lag <= self.max_lag:
            raise ValueError(f"lag {lag} is outside [0, {self.max_lag}]")
        return (lag + 1) * self.groups_per_step

    def is_stale(self, group_version: int, *, version: int) -> bool:
        """Whether a group whose oldest token is of `group_version` is too old for a learner at `version`.

        >>> rule = StalenessRule(groups_per_step=8, max_lag=2)
        >>> rule.is_stale(3, version=5), rule.is_stale(2, version=5)
        (False, True)
        """
        return version - group_version > self.max_lag

    def check(self, group_id: int, group_version: int, *, version: int) -> None:
        """Raises StaleTrajectoryError for a group that must not be consumed at `version`."""
        if self.is_stale(group_version, version=version):
            lag = version - group_version
            raise StaleTrajectoryError(f"group {group_id} has lag {lag}, allowed is {self.max_lag}")

    def would_strand(self, num_in_flight: Counter[int], num_ready: Counter[int], *, version: int) -> bool:
        """Whether groups in flight would become stale if the learner did not wait for them now.

        A group of version v must be consumed at v + max_lag or before: max_lag + v - `version` batches are left for it
        and for all groups that are not newer. Some group in flight is stranded if more groups than fit into these
        batches compete for them.

        Args:
            num_in_flight: groups still played, by version.
            num_ready: groups that a batch taken now would leave behind, by version.
            version: of the learner.
        """
        in_flight = competing = 0
        for group_version in sorted(num_in_flight.keys() | num_ready.keys()):
            in_flight += num_in_flight[group_version]
            competing += num_in_flight[group_version] + num_ready[group_version]
            if in_flight and competing > self.groups_per_step * (group_version + self.max_lag - version):
                return True
        return False
