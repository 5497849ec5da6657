"""The learning rate's schedule: its factor in each step. Pure.

A function of the policy version, the number of steps done, so a resumed run continues without any saved state. A
refused step counts too: versions advance.
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
