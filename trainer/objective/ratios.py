"""What an importance weight is taken of, and what is done with weights that are too large. Pure; float64 throughout.

Knows nothing of rewards, groups or baselines. All is done on logarithms, so nothing overflows before the weight itself
does; one that leaves e^80 becomes infinite, so that the step is refused by name and not trained on.
Shapes: _N action tokens of one trajectory, _M of all trajectories of a batch, _K those of them that
PPO's clip can act on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.presets import Ratio

LARGEST_LOG_WEIGHT = 80.0  # e^80 times a gradient still fits into float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The ratios a clip leaves alone."""

    low: float
    high: float


def log_weights(log_ratio_N: Tensor, ratio: Ratio) -> Tensor:
    """Log of the weight at each token: of the token, of the whole trajectory, or of its geometric mean. [N]

    sequence: sum_t log r_t at every token. geometric_mean: that sum divided by N (GSPO, arXiv 2507.18071).
    none: 0, no correction.
    """
    match ratio:
        case "none":
            # A NaN stays one: data whose log-probabilities are broken must not be trained on uncorrected either.
            return log_ratio_N * 0
        case "token":
            return log_ratio_N
        case "sequence":
            return log_ratio_N.sum().expand_as(log_ratio_N)
        case "geometric_mean":
            return (log_ratio_N.sum() / max(1, len(log_ratio_N))).expand_as(log_ratio_N)


def exp(log_weight: Tensor) -> Tensor:
    """The weight itself; infinite beyond e^80."""
    return log_weight.exp().masked_fill(log_weight > LARGEST_LOG_WEIGHT, math.inf)


def truncated(log_weight_N: Tensor, max_weight: float) -> Tensor:
    """log min(w, c): truncated importance sampling. [N]

    Ionides, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 17(2), 2008); of tokens, between engine and
    learner: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025,
    https://fengyao.notion.site/off-policy-rl).
    """
    return log_weight_N.clamp(max=math.log(max_weight))


def masked(log_weight_N: Tensor, *, low: float, high: float) -> Tensor:
    """log of w where low <= w <= high, of 0 elsewhere: masked importance sampling. [N]

    Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025,
    https://richardli.xyz/rl-collapse).
    """
    lowest = math.log(low) if low > 0 else -math.inf
    # Written so that a NaN is kept: it must reach whoever refuses the step.
    is_out_N = (log_weight_N < lowest) | (log_weight_N > math.log(high))
    return log_weight_N.masked_fill(is_out_N, -math.inf)


def clipped_weight(log_weight_N: Tensor, bounds: Bounds) -> Tensor:
    """log clip(w, low, high), through which no gradient flows: CISPO (MiniMax-M1, arXiv 2506.13585). [N]"""
    lowest = math.log(bounds.low) if bounds.low > 0 else None
    return log_weight_N.clamp(min=lowest, max=math.log(bounds.high))


def clipped_objective(log_weight_N: Tensor, advantage: float, bounds: Bounds) -> Tensor:
    """log of the weight that d/dtheta min(w A, clip(w, low, high) A) leaves on grad log pi: w or 0. [N]

    PPO (arXiv 1707.06347), with separate ends as in DAPO (arXiv 2503.14476).
    """
    if advantage > 0:
        is_cut_N = log_weight_N > math.log(bounds.high)
    else:
        lowest = math.log(bounds.low) if bounds.low > 0 else -math.inf
        is_cut_N = log_weight_N < lowest
    return log_weight_N.masked_fill(is_cut_N, -math.inf)


def second_moment_mask(log_ratio_M: Tensor, advantage_M: Tensor, bound: float) -> Tensor:
    """Which tokens stay: of those PPO's clip can act on, the largest (log r)^2 go until the others' mean is <= bound.

    M2PO (arXiv 2510.01161). PPO's clip can act where A > 0 and r > 1, or A < 0 and r < 1; all other tokens stay and do
    not count in the mean, as in the authors' code (Infini-AI-Lab/M2PO), which bounds the mean of capped moments where
    the paper masks. AReaL's documentation of M2PO takes the mean over all tokens. Tokens as large as the first that
    goes go too, so the answer does not depend on the order. bool [M]
    """
    is_bound_M = advantage_M * log_ratio_M > 0
    moment_M = log_ratio_M.square()
    sorted_K = moment_M[is_bound_M].sort().values
    mean_K = sorted_K.cumsum(0) / torch.arange(1, len(sorted_K) + 1, device=sorted_K.device)
    num_kept = int((mean_K <= bound).sum())
    if num_kept == len(sorted_K):
        return torch.ones_like(is_bound_M)
    return ~is_bound_M | (moment_M < sorted_K[num_kept])


def adaptive_bounds(
    log_ratio_M: Tensor,
    advantage_M: Tensor,
    *,
    low: tuple[float, float],
    high: tuple[float, float],
    step: float,
    positive_share: float,
) -> Bounds:
    """Bounds under which tokens of positive advantage make up `positive_share` of the loss, or the widest there are.

    The share is P / (P + Q) with P = sum_{A > 0} min(r, high) A and Q = sum_{A < 0} max(r, low) |A|. From the lowest
    bounds on, first the lower and then the upper one rises by `step`.

    BAPO (arXiv 2510.18927) as in its authors' code (WooooDyy/BAPO): this order, one step for both bounds. Summaries
    of the paper move them in turn, the upper one first, by steps of their own (docs/algorithms.md).
    """
    ratio_M = log_ratio_M.clamp(max=LARGEST_LOG_WEIGHT).exp()

    def share(at: Bounds) -> float:
        positive = float((ratio_M.clamp(max=at.high) * advantage_M.clamp(min=0)).sum())
        negative = float((ratio_M.clamp(min=at.low) * -advantage_M.clamp(max=0)).sum())
        return positive / (positive + negative) if positive + negative > 0 else 1.0

    bounds = Bounds(low=low[0], high=high[0])
    while share(bounds) < positive_share and bounds.low < low[1]:
        bounds = Bounds(low=min(bounds.low + step, low[1]), high=bounds.high)
    while share(bounds) < positive_share and bounds.high < high[1]:
        bounds = Bounds(low=bounds.low, high=min(bounds.high + step, high[1]))
    return bounds
