"""Importance ratios, and the treatments of weights that are too large. Pure; float64 throughout.

Independent of rewards, groups and baselines. Everything is computed on logarithms, so nothing overflows before the
weight itself does; a weight beyond e^80 becomes infinite, so that the step is refused by name instead of being trained
on. Shapes: _N action tokens of one trajectory, _M of all trajectories of a batch, _K those of them that PPO's clip can
act on.
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
    """The interval of ratios that a clip leaves unchanged: `Bounds(low=0.8, high=1.2)`."""

    low: float
    high: float


def log_weights(log_ratio_N: Tensor, ratio: Ratio) -> Tensor:
    """Log of each token's weight, from log r = log pi - log mu. [N]

    token: log r_t. suffix: sum_{s >= t} log r_s. sequence: sum_t log r_t at every token. geometric_mean: that sum
    divided by N (GSPO, arXiv 2507.18071). none: 0, no correction.

    >>> log_weights(torch.tensor([0.5, 1.5]), "sequence").tolist()
    [2.0, 2.0]
    """
    match ratio:
        case "none":
            # Times 0 and not zeros: NaN stays NaN, since broken log-probabilities must not be trained on uncorrected.
            return log_ratio_N * 0
        case "token":
            return log_ratio_N
        case "suffix":
            return vtrace(log_ratio_N, rho=math.inf, c=math.inf)
        case "sequence":
            return log_ratio_N.sum().expand_as(log_ratio_N)
        case "geometric_mean":
            return (log_ratio_N.sum() / max(1, len(log_ratio_N))).expand_as(log_ratio_N)


def vtrace(log_ratio_N: Tensor, *, rho: float, c: float) -> Tensor:
    """Log of V-trace's weight of each token (IMPALA, arXiv 1802.01561, eq. 1 and section 4.2), without a critic. [N]

        w_N = min(rho, r_N),   w_t = min(rho, r_t) prod_{t < s < N} min(c, r_s) min(rho, r_N)

    The policy gradient rho_t (r_t + gamma v_{t+1} - V) grad log pi_t with V the same number b everywhere, gamma 1 and a
    reward R at the end alone is w_t (R - b) grad log pi_t.

    >>> [round(w, 2) for w in vtrace(torch.tensor([2.0, 0.5, 3.0]).log(), rho=1.0, c=1.0).exp().tolist()]
    [0.5, 0.5, 1.0]
    """
    own_N = log_ratio_N.clamp(max=math.log(rho))
    later_N = torch.cat([log_ratio_N[:-1].clamp(max=math.log(c)), own_N[-1:]])
    after_N = later_N.flip(0).cumsum(0).flip(0)[1:]  # of the tokens after t
    return own_N + torch.cat([after_N, torch.zeros_like(own_N[-1:])])


def num_cut(log_ratio_N: Tensor, *, rho: float, c: float) -> int:
    """How many of the ratios in `vtrace` are over the bound of their place: rho for the first and the last, c between.

    >>> num_cut(torch.tensor([2.0, 0.5, 3.0]).log(), rho=1.0, c=1.0)
    2
    """
    bound_N = torch.full_like(log_ratio_N, math.log(c))
    bound_N[:1], bound_N[-1:] = math.log(rho), math.log(rho)
    return int((log_ratio_N > bound_N).sum())


def exp(log_weight: Tensor) -> Tensor:
    """exp(log w); infinite beyond e^80."""
    return log_weight.exp().masked_fill(log_weight > LARGEST_LOG_WEIGHT, math.inf)


def truncated(log_weight_N: Tensor, max_weight: float) -> Tensor:
    """log min(w, c): truncated importance sampling. [N]

    Ionides, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 17(2), 2008); applied to tokens, between engine
    and learner, by Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025,
    https://fengyao.notion.site/off-policy-rl).
    """
    return log_weight_N.clamp(max=math.log(max_weight))


def masked(log_weight_N: Tensor, *, low: float, high: float) -> Tensor:
    """log w where low <= w <= high, log 0 elsewhere: masked importance sampling. [N]

    Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025,
    https://richardli.xyz/rl-collapse).
    """
    lowest = math.log(low) if low > 0 else -math.inf
    # Written so that a NaN is kept: by it the step is refused later.
    is_out_N = (log_weight_N < lowest) | (log_weight_N > math.log(high))
    return log_weight_N.masked_fill(is_out_N, -math.inf)


def clipped_weight(log_weight_N: Tensor, bounds: Bounds) -> Tensor:
    """log clip(w, low, high), constant in the gradient: CISPO (MiniMax-M1, arXiv 2506.13585). [N]"""
    lowest = math.log(bounds.low) if bounds.low > 0 else None
    return log_weight_N.clamp(min=lowest, max=math.log(bounds.high))


def clipped_objective(
    log_weight_N: Tensor, advantage_N: Tensor, bounds: Bounds, *, dual_clip: float | None = None
) -> Tensor:
    """log of the weight that d/dtheta min(w A, clip(w, low, high) A) leaves on grad log pi: w or 0. [N]

    PPO (arXiv 1707.06347), with separate bounds as in DAPO (arXiv 2503.14476). With `dual_clip` = c the objective of a
    negative advantage is max(c A, min(...)) (arXiv 1912.09729): weights above c are cut there too.
    """
    lowest = math.log(bounds.low) if bounds.low > 0 else -math.inf
    is_cut_N = torch.where(advantage_N > 0, log_weight_N > math.log(bounds.high), log_weight_N < lowest)
    if dual_clip is not None:
        is_cut_N = is_cut_N | ((advantage_N < 0) & (log_weight_N > math.log(dual_clip)))
    return log_weight_N.masked_fill(is_cut_N, -math.inf)


def second_moment_mask(log_ratio_M: Tensor, advantage_M: Tensor, bound: float) -> Tensor:
    """Which tokens are kept, where the second moment is bounded by leaving tokens out. bool [M]

    Among the tokens that PPO's clip can act on, those with the largest (log r)^2 are dropped until the mean over the
    others is <= `bound`. The clip can act where A > 0 and r > 1, or A < 0 and r < 1; all other tokens are kept and do
    not count in the mean. Tokens as large as the first that is dropped are dropped too, so the result does not depend
    on the order. `second_moment_clip` is M2PO as its authors' code has it.
    """
    is_bound_M, moment_M, sorted_K = _bound_moments(log_ratio_M, advantage_M)
    num_kept = int((sorted_K.cumsum(0) / _counts(sorted_K) <= bound).sum())
    if num_kept == len(sorted_K):
        return torch.ones_like(is_bound_M)
    return ~is_bound_M | (moment_M < sorted_K[num_kept])


def second_moment_clip(log_ratio_M: Tensor, advantage_M: Tensor, bound: float) -> Tensor:
    """Which tokens M2PO (arXiv 2510.01161) keeps, as its authors' code (Infini-AI-Lab/M2PO) does. bool [M]

    Of the tokens that PPO's clip can act on (A > 0 and r > 1, or A < 0 and r < 1), those with (log r)^2 above a cap are
    cut: a clip between exp(-tau) and exp(tau), with tau^2 the cap. The cap is the largest (log r)^2 among them for
    which the mean of min((log r)^2, cap) is <= `bound`; nothing is cut where the mean itself is, and all of them where
    no cap is small enough. More tokens are cut than by `second_moment_mask`: of normal log ratios with deviation 0.3,
    18.8 % and not 10.1 %. (AReaL's documentation of M2PO takes the mean over all tokens.)
    """
    is_bound_M, moment_M, sorted_K = _bound_moments(log_ratio_M, advantage_M)
    if not bool(sorted_K.sum() > bound * len(sorted_K)):  # NaN is kept: by it the step is refused later
        return torch.ones_like(is_bound_M)
    count_K = _counts(sorted_K)
    capped_K = (sorted_K.cumsum(0) + sorted_K * (len(sorted_K) - count_K)) / len(sorted_K)
    num_allowed = int((capped_K <= bound).sum())
    if num_allowed == 0:
        return ~is_bound_M
    return ~is_bound_M | (moment_M <= sorted_K[num_allowed - 1])


def _bound_moments(log_ratio_M: Tensor, advantage_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens PPO's clip can act on, (log r)^2 of all tokens, and of those [K] in rising order."""
    is_bound_M = advantage_M * log_ratio_M > 0
    moment_M = log_ratio_M.square()
    return is_bound_M, moment_M, moment_M[is_bound_M].sort().values


def _counts(sorted_K: Tensor) -> Tensor:
    return torch.arange(1, len(sorted_K) + 1, device=sorted_K.device)


def adaptive_bounds(
    log_ratio_M: Tensor,
    advantage_M: Tensor,
    *,
    low: tuple[float, float],
    high: tuple[float, float],
    step: tuple[float, float],
    positive_share: float,
) -> Bounds:
    """Bounds under which tokens of positive advantage make up `positive_share` of the loss, or the widest allowed ones.

    The share is P / (P + Q) with P = sum_{A > 0} min(r, high) A and Q = sum_{A < 0} max(r, low) |A|. Both bounds start
    at their lowest value; first the lower and then the upper one is raised by its step until the share is reached.

    BAPO (arXiv 2510.18927) as in its authors' code (WooooDyy/BAPO), which asks for P / Q >= p: a share of p / (1 + p).
    Summaries of the paper raise the bounds in turn, the upper one first (docs/algorithms.md).

    Args:
        low, high: first and last value of each bound.
        step: of the lower and of the upper bound.
    """
    ratio_M = log_ratio_M.clamp(max=LARGEST_LOG_WEIGHT).exp()

    def share(at: Bounds) -> float:
        positive = float((ratio_M.clamp(max=at.high) * advantage_M.clamp(min=0)).sum())
        negative = float((ratio_M.clamp(min=at.low) * -advantage_M.clamp(max=0)).sum())
        return positive / (positive + negative) if positive + negative > 0 else 1.0

    bounds = Bounds(low=low[0], high=high[0])
    while share(bounds) < positive_share and bounds.low < low[1]:
        bounds = Bounds(low=min(bounds.low + step[0], low[1]), high=bounds.high)
    while share(bounds) < positive_share and bounds.high < high[1]:
        bounds = Bounds(low=bounds.low, high=min(bounds.high + step[1], high[1]))
    return bounds


def is_spurious(
    logprob_N: Tensor, entropy_N: Tensor, advantage_N: Tensor, *, probability: float, entropy: float
) -> Tensor:
    """Whether A > 0, pi(a) < `probability` and H < `entropy` (STAPO's S2T mask, arXiv 2602.15620). bool [N]

    >>> pi, entropy, advantage = torch.tensor([0.5, 0.001, 0.001]), torch.tensor([1.0, 0.1, 2.0]), torch.ones(3)
    >>> is_spurious(pi.log(), entropy, advantage, probability=0.002, entropy=0.5).tolist()
    [False, True, False]
    """
    return (advantage_N > 0) & (logprob_N < math.log(probability)) & (entropy_N < entropy)


def behavior_kl(log_ratio_N: Tensor) -> Tensor:
    """Per-token estimate of KL(mu || pi) from tokens of mu: r - 1 - log r with r = pi/mu. Never negative. [N]

    The k3 estimator of Schulman, "Approximating KL divergence" (2020, http://joschu.net/blog/kl-approx.html). log r is
    cut at 50: beyond that the number only has to be large, and sums over a step must stay finite. The parity check in
    agentrl/engine/base.py is not cut, because there an infinite value refuses the update.

    >>> float(behavior_kl(torch.tensor([0.0])))
    0.0
    """
    return log_ratio_N.clamp(max=50.0).expm1() - log_ratio_N
