"""How long to wait before another try: exponential, with jitter, under a limit. Knows nothing of what is tried."""

from __future__ import annotations

import math
import random

MAX_BACKOFF_S = 30.0
MAX_DOUBLINGS = 64  # far beyond any limit: an engine may be asked for ever, and 2**1024 is no float


def backoff_s(attempt: int, *, base_s: float, max_s: float = MAX_BACKOFF_S) -> float:
    """Seconds before try `attempt` + 1: between half and all of `base_s` doubled `attempt` times, at most `max_s`.

    The jitter keeps many episodes that failed together from coming back together.
    """
    doubled_s = math.ldexp(base_s, min(attempt, MAX_DOUBLINGS))
    return min(doubled_s, max_s) * random.uniform(0.5, 1.0)
