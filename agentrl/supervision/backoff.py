"""How long to wait before another try, and how often to try at all. Knows nothing of what is tried."""

from __future__ import annotations

import math
import random

MAX_BACKOFF_S = 30.0
REFILL_S = 3600.0
MAX_DOUBLINGS = 64  # far beyond any limit: an engine may be asked for ever, and 2**1024 is no float


def backoff_s(attempt: int, *, base_s: float, max_s: float = MAX_BACKOFF_S) -> float:
    """Seconds before try `attempt` + 1: between half and all of `base_s` doubled `attempt` times, at most `max_s`.

    The jitter keeps many episodes that failed together from coming back together.
    """
    doubled_s = math.ldexp(base_s, min(attempt, MAX_DOUBLINGS))
    return min(doubled_s, max_s) * random.uniform(0.5, 1.0)


class RestartBudget:
    """Restarts that are left to a part that keeps dying; each `refill_s` of good health gives one back.

    So a part that dies once a day goes on for ever, and one that dies as soon as it is started is soon given up.
    """

    def __init__(self, number: int, *, refill_s: float = REFILL_S) -> None:
        self._number = number
        self._left = float(number)
        self._refill_s = refill_s

    def take(self, healthy_s: float) -> int | None:
        """Use one after a life of `healthy_s`. Returns how many had been used by then; None where none is left."""
        left = min(float(self._number), self._left + healthy_s / self._refill_s)
        if left < 1:
            return None
        self._left = left - 1
        return math.ceil(self._number - left)

    @property
    def left(self) -> int:
        """Restarts that a part which died now, and again at once, would get."""
        return int(self._left)
