"""Decides how many versions of lag admission may work with, from the ESS ratio of step after step.

Knows nothing of buffers, groups or the learner: numbers in, a number out.
"""

from __future__ import annotations

from collections.abc import Mapping

RECOVERY = 10
"""Lag comes back this many times slower than it goes: a policy that has drifted once drifts again."""


class EssGuard:
    """Lag goes down by one after `num_steps` steps in a row below `floor`, up by one after ten times as many above it.

    Args:
        max_lag: where it starts, and the most it ever gives.
        floor: ESS ratio; None never changes anything.
        num_steps: steps in a row that count.
    """

    def __init__(self, *, max_lag: int, floor: float | None, num_steps: int) -> None:
        self.lag = max_lag
        self._max_lag = max_lag
        self._floor = floor
        self._num_steps = num_steps
        self._num_below = 0
        self._num_above = 0

    def observe(self, ess_ratio: float | None) -> int:
        """The lag to admit with from now on. A step whose ratio could not be measured counts as one below."""
        if self._floor is None:
            return self.lag
        if ess_ratio is None or not ess_ratio >= self._floor:
            self._num_below, self._num_above = self._num_below + 1, 0
        else:
            self._num_below, self._num_above = 0, self._num_above + 1
        if self._num_below == self._num_steps:
            self._move(-1)
        elif self._num_above == RECOVERY * self._num_steps:
            self._move(+1)
        return self.lag

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold."""
        return {"lag": self.lag, "num_below": self._num_below, "num_above": self._num_above}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. A smaller `max_lag`, or no floor, in the config wins."""
        if self._floor is not None:
            self.lag = min(state["lag"], self._max_lag)
            self._num_below, self._num_above = state["num_below"], state["num_above"]

    def _move(self, by: int) -> None:
        self.lag = min(max(self.lag + by, 0), self._max_lag)
        self._num_below = self._num_above = 0
