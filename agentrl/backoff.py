"""How long to wait before another try: exponential, with jitter, under a limit. Knows nothing of what is tried."""

from __future__ import annotations

import random

MAX_BACKOFF_S = 30.0


def backoff_s(attempt: int, *, base_s: float, max_s: float = MAX_BACKOFF_S) -> float:
    """Seconds before try `attempt` + 1: between half and all of `base_s` doubled `attempt` times, at most `max_s`.

    The jitter keeps many episodes that failed together from coming back together.
    """
    return min(base_s * 2.0**attempt, max_s) * random.uniform(0.5, 1.0)
