"""Retries: how long to wait before the next one, and how many a part gets. Independent of what is retried."""

from __future__ import annotations

import math
import random

MAX_BACKOFF_S = 30.0
REFILL_S = 3600.0
MAX_DOUBLINGS = 64  # far beyond any limit: some retries never stop, and 2**1024 does not fit into a float


def backoff_s(attempt: int, *, base_s: float, max_s: float = MAX_BACKOFF_S) -> float:
    """Seconds before try `attempt` + 1: between half and all of `base_s` doubled `attempt` times, at most `max_s`.

    The jitter keeps episodes that failed together from retrying together.

    >>> 2.0 <= backoff_s(2, base_s=1.0) <= 4.0
    True
    """
    doubled_s = math.ldexp(base_s, min(attempt, MAX_DOUBLINGS))
    return min(doubled_s, max_s) * random.uniform(0.5, 1.0)


class RestartBudget:
    """The restarts a part may still use; each `refill_s` without a death adds one, up to `number`.

    A part that dies once a day is restarted forever, and one that dies at every start is soon given up.

    >>> budget = RestartBudget(1)
    >>> budget.take(healthy_s=0.0), budget.take(healthy_s=0.0)
    (0, None)
    """

    def __init__(self, number: int, *, refill_s: float = REFILL_S) -> None:
        self._number = number
        self._left = float(number)
        self._refill_s = refill_s

    def take(self, healthy_s: float) -> int | None:
        """Use one restart after `healthy_s` without a death. Returns how many were in use; None when none is left."""
        left = min(float(self._number), self._left + healthy_s / self._refill_s)
        if left < 1:
            return None
        self._left = left - 1
        return math.ceil(self._number - left)

    @property
    def left(self) -> int:
        """Restarts left if the part died now."""
        return int(self._left)
