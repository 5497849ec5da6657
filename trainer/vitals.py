"""What a step says about itself: metrics from the terms of all trajectories, of all ranks. Knows no tensors of a model.

Every number is finite: weights are shown up to e^80, and a step with no finite trajectory shows counts only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainer import vcpo
from trainer.gradients import LARGEST_LOG_WEIGHT, GroupTerms, TrajectoryTerms


def members(groups: Sequence[GroupTerms]) -> list[TrajectoryTerms]:
    """All trajectories of the step. [B]"""
    return [trajectory for group in groups for trajectory in group.trajectories]


def counts(groups: Sequence[GroupTerms]) -> dict[str, float]:
    """How much of what the step was made of."""
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


def policy(groups: Sequence[GroupTerms]) -> dict[str, float]:
    """Divergence and entropy per action token, and agreement with the engine where both had the same weights."""
    finite = [trajectory for trajectory in members(groups) if not trajectory.non_finite()]
    metrics = {}
    if num_actions := sum(trajectory.num_action_tokens for trajectory in finite):
        metrics["learner/kl"] = sum(trajectory.kl_sum for trajectory in finite) / num_actions
        metrics["learner/entropy"] = sum(trajectory.entropy_sum for trajectory in finite) / num_actions
    if num_parity := sum(trajectory.num_parity_tokens for trajectory in finite):
        metrics["learner/parity_mean_abs"] = sum(trajectory.parity_sum for trajectory in finite) / num_parity
        metrics["learner/parity_kl"] = sum(trajectory.parity_kl_sum for trajectory in finite) / num_parity
        metrics["learner/parity_max_abs"] = max(trajectory.parity_max for trajectory in finite)
    return metrics


def weights(groups: Sequence[GroupTerms], *, max_weight: float | None) -> dict[str, float]:
    """Importance weights of the trajectories whose numbers are finite, and where the baselines lie."""
    finite = [trajectory for trajectory in members(groups) if not trajectory.non_finite()]
    if not finite:
        return {}
    log_weight_B = torch.tensor([trajectory.log_weight for trajectory in finite], dtype=torch.float64)
    weight_B = log_weight_B.clamp(max=LARGEST_LOG_WEIGHT).exp()
    limit = math.inf if max_weight is None else math.log(max_weight)
    shifts = [
        group.baseline_minus_mean for group in groups if group.has_gradient and math.isfinite(group.baseline_minus_mean)
    ]
    return {
        "learner/ess_ratio": float(vcpo.ess_ratio(log_weight_B)),
        "learner/ess_ratio_truncated": float(vcpo.ess_ratio(log_weight_B.clamp(max=limit))),
        "learner/mean_weight": float(weight_B.mean()),
        "learner/max_weight": float(weight_B.max()),
        "learner/clip_fraction": float((log_weight_B > limit).double().mean()),
        "learner/baseline_minus_mean": sum(shifts) / len(shifts) if shifts else 0.0,
    }
