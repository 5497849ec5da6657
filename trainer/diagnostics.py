"""Metrics of a step, from the statistics of all trajectories of all ranks. Independent of models.

Every number is finite: weights are reported up to e^80, and for a step without a finite trajectory only counts are.
docs/algorithms.md explains each number and what to do when it looks bad.
Shapes: _B trajectories of the step, _E episodes of a group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.engine.base import Parity
from agentrl.engine.parity import log_ratio_at
from agentrl.types import SumSigma
from trainer.objective import baselines, vcpo
from trainer.objective.ratios import LARGEST_LOG_WEIGHT
from trainer.step_stats import PARITY_BLOCK, GroupStats, TrajectoryStats

LAG_BUCKETS = (("0", 0), ("1_2", 2), ("3_8", 8), ("9_up", math.inf))
LENGTH_BUCKETS = (("to_128", 128), ("to_512", 512), ("to_2048", 2048), ("above", math.inf))  # action tokens
HEALTHY_MEAN_WEIGHT = (0.8, 1.25)
PARITY_WIDTHS = (1, 4, 16)  # of PARITY_BLOCK tokens
MIN_SUMS = 4  # for a standard deviation

SPURIOUS_SHARE = 1e-3
"""Share of spurious tokens above which the bounds are too wide: ten times what STAPO (arXiv 2602.15620) reports."""

MASKED_SHARE = 0.9
"""Share of action tokens left out by rollout.partial=mask above which a step hardly trains."""

# The compared baselines as functions of a group's weighted score norms, rewards and lengths (per episode).
# otb would need every token's own score; trainer/split_variance.py measures its variance instead.
_RULES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor | None]] = {
    "none": lambda size_E, reward_E, length_E: torch.zeros_like(reward_E),
    "mean": lambda size_E, reward_E, length_E: baselines.mean(reward_E),
    "leave_one_out": lambda size_E, reward_E, length_E: baselines.leave_one_out(reward_E),
    "length_weighted": lambda size_E, reward_E, length_E: baselines.length_weighted(reward_E, length_E),
    "opob": lambda size_E, reward_E, length_E: vcpo.optimal_baseline(torch.zeros_like(size_E), size_E, reward_E),
    "opob_safe": lambda size_E, reward_E, length_E: vcpo.safe_baseline(torch.zeros_like(size_E), size_E, reward_E),
    "opob_leave_one_out": lambda size_E, reward_E, length_E: vcpo.leave_one_out_baseline(
        torch.zeros_like(size_E), size_E, reward_E
    ),
    "opob_safe_leave_one_out": lambda size_E, reward_E, length_E: vcpo.safe_leave_one_out_baseline(
        torch.zeros_like(size_E), size_E, reward_E
    ),
}


def members(groups: Sequence[GroupStats]) -> list[TrajectoryStats]:
    """All trajectories of the step. [B]"""
    return [trajectory for group in groups for trajectory in group.trajectories]


def counts(groups: Sequence[GroupStats]) -> dict[str, float]:
    """Numbers of trajectories, tokens and groups, and their lag."""
    trajectories = members(groups)
    lags = [trajectory.lag for trajectory in trajectories]
    return {
        "learner/num_trajectories": float(len(trajectories)),
        "learner/num_tokens": float(sum(trajectory.num_tokens for trajectory in trajectories)),
        "learner/num_action_tokens": float(sum(trajectory.num_action_tokens for trajectory in trajectories)),
        "learner/zero_variance_groups": float(sum(not group.has_spread for group in groups)),
        "learner/groups_without_gradient": float(sum(not group.has_gradient for group in groups)),
        "learner/lag_mean": sum(lags) / len(lags),
        "learner/lag_max": float(max(lags)),
    }


def policy(groups: Sequence[GroupStats]) -> dict[str, float]:
    """Divergence and entropy per action token, and the difference to the engine where both had the same weights."""
    finite = _finite(groups)
    metrics = {}
    if num_actions := sum(trajectory.num_action_tokens for trajectory in finite):
        metrics["learner/kl"] = sum(trajectory.kl_sum for trajectory in finite) / num_actions
        metrics["learner/entropy"] = sum(trajectory.entropy_sum for trajectory in finite) / num_actions
    scored = [(one.reference_kl_sum, one.num_action_tokens) for one in finite if one.reference_kl_sum is not None]
    if num_scored := sum(size for _, size in scored):
        metrics["learner/reference_kl"] = sum(kl for kl, _ in scored) / num_scored
    if (difference := parity(groups)) is not None:
        metrics["learner/parity_mean_abs"] = difference.mean_abs
        metrics["learner/parity_kl"] = difference.kl
        metrics["learner/parity_max_abs"] = difference.max_abs
    if (on_policy := on_policy_ratio(groups)) is not None:
        metrics["learner/ess_ratio_on_policy"] = on_policy
    metrics |= {f"learner/parity_sigma_{one.length}": one.sigma for one in parity_sigmas(groups)}
    return metrics


def parity(groups: Sequence[GroupStats]) -> Parity | None:
    """The difference to the engine over the tokens that it sampled with the learner's weights; None without any."""
    finite = _finite(groups)
    num_tokens = sum(trajectory.num_parity_tokens for trajectory in finite)
    if not num_tokens:
        return None
    return Parity(
        max_abs=max(trajectory.parity_max for trajectory in finite),
        mean_abs=sum(trajectory.parity_sum for trajectory in finite) / num_tokens,
        kl=sum(trajectory.parity_kl_sum for trajectory in finite) / num_tokens,
    )


def parity_sigmas(groups: Sequence[GroupStats]) -> tuple[SumSigma, ...]:
    """Spread of the log-ratio to the engine, summed over 1, 256, 1024 and 4096 tokens that it sampled in a row with the
    learner's weights; the lengths of which there are at least MIN_SUMS sums.
    """
    finite = _finite(groups)
    num_tokens = sum(trajectory.num_parity_tokens for trajectory in finite)
    if not num_tokens:
        return ()
    rms = math.sqrt(sum(trajectory.parity_square_sum for trajectory in finite) / num_tokens)
    found = [SumSigma(length=1, sigma=rms, num_sums=num_tokens)]
    for width in PARITY_WIDTHS:
        sums = [
            sum(trajectory.parity_blocks[start : start + width])
            for trajectory in finite
            for start in range(0, len(trajectory.parity_blocks) - width + 1, width)
        ]
        if len(sums) >= MIN_SUMS:
            found.append(SumSigma(length=width * PARITY_BLOCK, sigma=statistics.stdev(sums), num_sums=len(sums)))
    return tuple(found)


def on_policy_ratio(groups: Sequence[GroupStats]) -> float | None:
    """The ESS ratio that this step would have if the learner's own version had sampled all of it.

    Measured where it did. Else from the log-ratios of the tokens that it sampled: normal log weights whose deviation
    grows with length as theirs (`log_ratio_at`); 1/rho is then the mean of 1/rho_i over trajectories. None where it
    sampled fewer than PARITY_BLOCK tokens.
    """
    acting = [trajectory for trajectory in _finite(groups) if trajectory.num_action_tokens]
    if not acting:
        return None
    if all(one.num_parity_tokens == one.num_action_tokens for one in acting):
        return float(vcpo.ess_ratio(_log_weights(acting)))
    if sum(one.num_parity_tokens for one in acting) < PARITY_BLOCK:
        return None
    sums = parity_sigmas(groups)
    found = [log_ratio_at(one.num_action_tokens, sums) for one in acting]
    return max(1 / len(acting), statistics.harmonic_mean([one.rho for one in found if one]))


def weights(groups: Sequence[GroupStats], *, max_weight: float | None) -> dict[str, float]:
    """Importance weights of the trajectories whose numbers are finite, and the groups' baselines.

    `max_weight` is the c at which weights are truncated for the truncated ESS ratio; None does not truncate.
    """
    finite = _finite(groups)
    if not finite:
        return {}
    log_weight_B = _log_weights(finite)
    weight_B = _weights(finite)
    limit = math.inf if max_weight is None else math.log(max_weight)
    return {
        "learner/ess_ratio": float(vcpo.ess_ratio(log_weight_B)),
        "learner/ess_ratio_truncated": float(vcpo.ess_ratio(log_weight_B.clamp(max=limit))),
        "learner/mean_weight": float(weight_B.mean()),
        "learner/max_weight": float(weight_B.max()),
        "learner/clip_fraction": _clip_fraction(finite),
        **_baseline_shifts(groups),
    }


def breakdowns(
    groups: Sequence[GroupStats], *, algorithm: AlgorithmConfig, grad_norm: float | None
) -> dict[str, float]:
    """Weights by lag and by length, the variance of the gradient under each baseline, and the share of spurious tokens.

    `grad_norm` is the norm of the step's gradient before clipping; None if the step was refused.
    """
    finite = _finite(groups)
    by_lag = _buckets(finite, "lag", LAG_BUCKETS, lambda trajectory: trajectory.lag)
    by_length = _buckets(finite, "length", LENGTH_BUCKETS, lambda trajectory: trajectory.num_action_tokens)
    variances = {} if grad_norm is None else variance(groups, algorithm=algorithm, grad_norm=grad_norm)
    spurious = {} if algorithm.spurious is None else {"learner/spurious_share": spurious_share(groups)}
    return by_lag | by_length | variances | spurious


def variance(groups: Sequence[GroupStats], *, algorithm: AlgorithmConfig, grad_norm: float) -> dict[str, float]:
    """Trace of the covariance of the step's gradient, under the baseline in use and under each other one.

        tr Cov(g) = (sum_e |x_e|^2 - B |g|^2) / (B (B - 1))        x_e = (R_e - b) / s * sum_i w_i score_i

    with g their mean, over B episodes e and their trajectories i; scores within an episode are assumed orthogonal. This
    is the average, over all splits of the batch into halves, of what one split gives. It assumes independent episodes;
    a baseline made from its own group violates this by O(1/G). For baselines that are not in use, |g| is that of the
    one in use: equal in expectation, since a constant baseline does not change the mean. Empty where no norms were
    measured.
    """
    size = sum(len(group.episodes()) for group in groups)
    active = [group for group in groups if group.has_gradient and not any(m.non_finite() for m in group.trajectories)]
    has_norms = any(trajectory.score_norm > 0 for trajectory in members(active))
    if size < 2 or not has_norms or algorithm.baseline_norms != "exact":  # a proxy has no common scale with |g|
        return {}

    def trace(square_sum: float) -> float:
        return (square_sum - size * grad_norm * grad_norm) / (size * (size - 1))

    in_use = sum(map(_contribution, members(active)))
    metrics = {"vitals/variance": trace(in_use)}
    if grad_norm > 0:
        metrics["vitals/noise_to_signal"] = trace(in_use) / grad_norm / grad_norm
    for name, rule in _RULES.items():
        metrics[f"vitals/variance_{name}"] = trace(sum(_square_sum(group, rule, algorithm) for group in active))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def mean_weight(groups: Sequence[GroupStats], *, max_lag: int | None = None) -> float | None:
    """Mean importance weight of the trajectories of at most this lag whose numbers are finite; None if there is none.

    `max_lag` None: of any lag.
    """
    finite = [one for one in _finite(groups) if max_lag is None or one.lag <= max_lag]
    return float(_weights(finite).mean()) if finite else None


def spurious_share(groups: Sequence[GroupStats]) -> float:
    """Share of the action tokens that were left out because they are spurious."""
    finite = _finite(groups)
    num_actions = sum(trajectory.num_action_tokens for trajectory in finite)
    return sum(trajectory.num_silenced for trajectory in finite) / max(1, num_actions)


def alarms(
    mean_weight: float | None,
    spurious_share: float = 0.0,
    *,
    masked_share: float = 0.0,
    lower: str = "rollout.max_lag or learner.lr",
) -> list[str]:
    """Messages about numbers that need a person's attention now. `lower`: the keys that make the data fresher."""
    found = []
    low, high = HEALTHY_MEAN_WEIGHT
    if mean_weight is not None and not low <= mean_weight <= high:
        found.append(
            f"mean importance weight {mean_weight:.3g} is outside [{low}, {high}]: the policy is leaving the data; "
            f"lower {lower}"
        )
    if spurious_share > SPURIOUS_SHARE:
        found.append(
            f"{spurious_share:.2%} of the action tokens are left out as spurious, the paper's share is 0.01%: lower "
            "algorithm.spurious.probability, or its bound of the entropy"
        )
    if MASKED_SHARE < masked_share < 1:  # where nothing is left the step is refused
        found.append(
            f"older weights sampled {masked_share:.0%} of the action tokens, which rollout.partial=mask leaves out: "
            "lower rollout.oversample, or set rollout.partial=keep"
        )
    return found


def _finite(groups: Sequence[GroupStats]) -> list[TrajectoryStats]:
    return [trajectory for trajectory in members(groups) if not trajectory.non_finite()]


def _log_weights(trajectories: Sequence[TrajectoryStats]) -> Tensor:
    return torch.tensor([trajectory.log_weight for trajectory in trajectories], dtype=torch.float64)


def _weights(trajectories: Sequence[TrajectoryStats]) -> Tensor:
    return _log_weights(trajectories).clamp(max=LARGEST_LOG_WEIGHT).exp()


def _clip_fraction(trajectories: Sequence[TrajectoryStats]) -> float:
    num_weights = sum(trajectory.num_weights for trajectory in trajectories)
    return sum(trajectory.num_clipped for trajectory in trajectories) / max(1, num_weights)


def _baseline_shifts(groups: Sequence[GroupStats]) -> dict[str, float]:
    """The groups' baselines relative to their mean rewards."""
    shifts = [g.baseline_minus_mean for g in groups if g.has_gradient and math.isfinite(g.baseline_minus_mean)]
    if not shifts:
        return {"learner/baseline_minus_mean": 0.0}
    return {
        "learner/baseline_minus_mean": sum(shifts) / len(shifts),
        "learner/baseline_minus_mean_min": min(shifts),
        "learner/baseline_minus_mean_max": max(shifts),
        "learner/baseline_above_mean": sum(shift > 1e-9 for shift in shifts) / len(shifts),
    }


def _buckets(
    trajectories: Sequence[TrajectoryStats],
    axis: str,
    edges: Sequence[tuple[str, float]],
    key: Callable[[TrajectoryStats], float],
) -> dict[str, float]:
    """Numbers of each bucket that has trajectories; a bucket includes its upper edge."""
    total = sum(_contribution(trajectory) for trajectory in trajectories)
    metrics, lower = {}, -math.inf
    for name, upper in edges:
        inside = [trajectory for trajectory in trajectories if lower < key(trajectory) <= upper]
        lower = upper
        for what, value in _bucket(inside, total).items():
            metrics[f"vitals/{axis}_{name}_{what}"] = value
    return metrics


def _bucket(inside: Sequence[TrajectoryStats], total: float) -> dict[str, float]:
    if not inside:
        return {}
    log_weight_B = _log_weights(inside)
    metrics = {
        "ess_ratio": float(vcpo.ess_ratio(log_weight_B)),
        "max_weight": float(log_weight_B.max().clamp(max=LARGEST_LOG_WEIGHT).exp()),
        "clip_fraction": _clip_fraction(inside),
    }
    if num_actions := sum(trajectory.num_action_tokens for trajectory in inside):
        metrics["kl"] = sum(trajectory.kl_sum for trajectory in inside) / num_actions
    if total > 0 and math.isfinite(total):
        metrics["gradient_share"] = sum(_contribution(trajectory) for trajectory in inside) / total
    return metrics


def _contribution(trajectory: TrajectoryStats) -> float:
    """Its part in |x_e|^2, and so in the squared norm of the gradient, as if scores were orthogonal."""
    size = trajectory.weight * trajectory.advantage * trajectory.score_norm
    return size * size  # infinite on overflow, where ** would raise


def _square_sum(
    group: GroupStats, rule: Callable[[Tensor, Tensor, Tensor], Tensor | None], algorithm: AlgorithmConfig
) -> float:
    """sum_e |x_e|^2 of one group under another baseline."""
    episodes = group.episodes()
    reward_E = torch.tensor([segments[0].reward for segments in episodes], dtype=torch.float64)
    length_E = torch.tensor([sum(segment.num_action_tokens for segment in segments) for segments in episodes])
    sizes = [math.hypot(*(segment.weight * segment.score_norm for segment in segments)) for segments in episodes]
    size_E = torch.tensor(sizes, dtype=torch.float64)
    baseline = rule(size_E, reward_E, length_E)
    kind = algorithm.normalize_by_std
    std = float(baselines.reward_std(reward_E, kind)) if kind else 1.0
    centered_E = reward_E if baseline is None else reward_E - baseline
    return float((size_E * centered_E / std).square().sum())
