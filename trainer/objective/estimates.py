"""What is asked of rewards and log-ratios whichever algorithm is used. Pure: tensors in, tensors out; float64.

Knows nothing of weights or baselines: see ratios.py, baselines.py and family.py.
Shapes: _G members of one group, _N action tokens of one trajectory.
"""

from __future__ import annotations

from torch import Tensor


def reward_std(reward_G: Tensor) -> Tensor:
    """Sample standard deviation, as in GRPO (arXiv 2402.03300). Defined for groups with spread only."""
    return reward_G.std(unbiased=True)


def behavior_kl(log_ratio_N: Tensor) -> Tensor:
    """Per-token estimate of KL(mu || pi) from tokens of mu: r - 1 - log r with r = pi/mu, never negative. [N]

    The k3 estimator of Schulman, "Approximating KL divergence" (2020). log r is cut at 50: beyond it the number only
    has to be large, and must stay finite.
    """
    return log_ratio_N.clamp(max=50.0).expm1() - log_ratio_N
