"""The ESS guard: chooses the lag with which groups are admitted, from the ESS ratio of each step.

Independent of buffers, groups and the learner: numbers in, a number out.
"""

from __future__ import annotations

from collections.abc import Mapping

RECOVERY = 10
"""The lag rises this many times slower than it falls: a policy that has drifted once may drift again."""


class EssGuard:
    """Lowers the lag by one after `num_steps` steps in a row below `floor`, raises it after ten times as many above it.

    Args:
        max_lag: the lag at the start, and the largest; may be a fraction.
        floor: ESS ratio; None: the lag never changes.
        num_steps: steps in a row that change the lag.

    >>> guard = EssGuard(max_lag=2, floor=0.5, num_steps=2)
    >>> guard.observe(0.1), guard.observe(0.1)
    (2, 1)
    """

    def __init__(self, *, max_lag: float, floor: float | None, num_steps: int) -> None:
        self.lag = max_lag
        self._max_lag = max_lag
        self._floor = floor
        self._num_steps = num_steps
        self._num_below = 0
        self._num_above = 0

    def observe(self, ess_ratio: float | None) -> float:
        """The lag from now on. A step whose ratio could not be measured counts as below the floor."""
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

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"lag": self.lag, "num_below": self._num_below, "num_above": self._num_above}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a `state_dict`. A smaller `max_lag`, or no floor, in the config takes precedence."""
        if self._floor is not None:
            self.lag = min(state["lag"], self._max_lag)
            self._num_below, self._num_above = int(state["num_below"]), int(state["num_above"])

    def _move(self, by: float) -> None:
        self.lag = min(max(self.lag + by, 0.0), self._max_lag)
        self._num_below = self._num_above = 0
