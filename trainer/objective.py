"""The policy-gradient estimator over whole episodes: ratios, truncation, advantages, and what is measured of them.

Pure: tensors in, tensors out. Knows nothing of models, DeepSpeed or the baseline that VCPO adds (see vcpo.py).

    g = 1/B * sum_i wbar_i * (R_i - b_i) / s_group(i) * grad log pi(tau_i)          (arXiv 2602.17616, section 4)

Shapes: _B trajectories of the step, _G members of one group, _N action tokens of one trajectory. float64 throughout.
"""

from __future__ import annotations

import math

from torch import Tensor


def sequence_log_weight(logprob_N: Tensor, behavior_logprob_N: Tensor) -> Tensor:
    """log w = sum over action tokens of log pi - log mu, summed in float64. No action tokens: 0, an empty product."""
    return (logprob_N.double() - behavior_logprob_N.double()).sum()


def truncated_log_weight(log_weight: Tensor, max_weight: float | None) -> Tensor:
    """log min(w, c), so that no weight ever overflows. `max_weight` None leaves it as it is."""
    return log_weight if max_weight is None else log_weight.clamp(max=math.log(max_weight))


def mean_baseline(reward_G: Tensor) -> Tensor:
    """The group's mean reward, for every member. [G]"""
    return reward_G.mean().expand_as(reward_G)


def leave_one_out_baseline(reward_G: Tensor) -> Tensor:
    """Mean reward of the *other* members (RLOO, arXiv 2402.14740). [G] Raises ValueError for a single member."""
    if len(reward_G) < 2:
        raise ValueError("leave-one-out needs at least two members")
    return (reward_G.sum() - reward_G) / (len(reward_G) - 1)


def has_spread(reward_G: Tensor) -> bool:
    """Whether rewards differ at all: no member, one, or equal rewards say nothing about which action was better."""
    return bool((reward_G != reward_G[:1]).any())


def reward_std(reward_G: Tensor) -> Tensor:
    """Sample standard deviation, as in GRPO (arXiv 2402.03300). Defined for groups with spread only."""
    return reward_G.std(unbiased=True)


def behavior_kl(log_ratio_N: Tensor) -> Tensor:
    """Per-token estimate of KL(mu || pi) from tokens of mu: r - 1 - log r with r = pi/mu, never negative. [N]

    The k3 estimator of Schulman, "Approximating KL divergence" (2020). log r is cut at 50: beyond it the number only
    has to be large, and must stay finite.
    """
    return log_ratio_N.clamp(max=50.0).expm1() - log_ratio_N
