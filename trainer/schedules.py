"""Settings that change with the step: the learning rate's factor, and a coefficient between two values. Pure.

Each is a function of the policy version, the number of steps done, so a resumed run continues without any saved state.
A refused step counts too: versions advance.
"""

from __future__ import annotations

import math
from typing import assert_never

from agentrl.config import LearnerConfig


def rate_factor(version: int, learner: LearnerConfig, *, num_steps: int) -> float:
    """Factor of `learner.lr` in the step from `version` to `version + 1`, in a run of `num_steps` steps.

    (version + 1) / W during the W steps of warm-up. Then, with x = (version - W) / (num_steps - W): 1 (constant), 1 - x
    (linear) or (1 + cos(pi x)) / 2 (cosine; Loshchilov and Hutter, arXiv 1608.03983, eq. 5, one cycle down to 0). The
    full rate is used in the step of x = 0. 0 after the last step.

    >>> learner = LearnerConfig(warmup_steps=2, schedule="linear")
    >>> [rate_factor(version, learner, num_steps=6) for version in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = learner.warmup_steps
    if version < warmup:
        return (version + 1) / warmup
    share = min(1.0, (version - warmup) / (num_steps - warmup))
    match learner.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - share
        case "cosine":
            return (1 + math.cos(math.pi * share)) / 2
        case _:
            assert_never(learner.schedule)


def annealed(version: int, *, start: float, end: float, num_steps: int) -> float:
    """From `start` at version 0 to `end` at `num_steps` in equal steps, and `end` from there on.

    >>> [round(annealed(version, start=0.012, end=0.004, num_steps=4), 3) for version in (0, 1, 4, 9)]
    [0.012, 0.01, 0.004, 0.004]
    """
    share = min(1.0, version / num_steps) if num_steps else 1.0
    return start + (end - start) * share
