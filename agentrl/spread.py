"""Whether the rewards of a group differ by more than rounding: what the buffer drops and what the learner scales by.

Plain floats: knows nothing of baselines or of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-9
"""Rewards are weighted sums of floats: equal ones may differ in their last bits, which a standard deviation of their
own size would blow up to a whole advantage."""


def has_spread(rewards_G: Sequence[float]) -> bool:
    """Whether max R - min R > 1e-9 max(1, max |R|): if not, no action is known to be better than another.

    False for no member and for one. NaN and infinities among several are spread, so that whoever refuses the step sees
    them.
    """
    if len(rewards_G) < 2:
        return False
    if not all(map(math.isfinite, rewards_G)):
        return True
    return max(rewards_G) - min(rewards_G) > ROUNDING * max(1.0, *map(abs, rewards_G))
