"""Each trajectory's own gradient, its norm, and the weighted sum of all: a loop of exact single backwards.

Knows nothing of DeepSpeed: it reads parameters and leaves a float32 sum beside them. Two gradient-sized buffers: the
sum over the step, and sum_i wbar_i/s grad_i of the open group, by which the group's baseline is moved once the norms
are known:  g += A - (b* - b_0) S  with A already taken about the reference baseline b_0, so that little cancels.
Shapes: _G members of a group, _N action tokens of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.types import Trajectory, TrajectoryGroup
from trainer import objective, vcpo
from trainer.logprobs import action_logprobs
from trainer.packing import action_tensors

LARGEST_LOG_WEIGHT = 80.0  # e^80 times a gradient still fits into float32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTerms:
    """What one trajectory contributes, as numbers. Sums are over its action tokens."""

    id: str
    reward: float
    log_weight: float  # untruncated
    weight: float  # wbar, as the estimator uses it; infinite when it would leave float32
    score_norm: float  # of grad log pi as the loss uses it (length-normalised or not); 0.0 where none was needed
    lag: int
    num_tokens: int
    num_action_tokens: int
    kl_sum: float
    entropy_sum: float
    num_parity_tokens: int  # sampled by the learner's own version
    parity_sum: float  # |learner - behaviour| logprob over those
    parity_max: float
    parity_kl_sum: float  # KL(engine || learner), estimated on those

    def non_finite(self) -> list[str]:
        """Names of the numbers that are NaN or infinite."""
        names = ("reward", "log_weight", "weight", "score_norm", "kl_sum", "entropy_sum")
        return [name for name in names if not math.isfinite(getattr(self, name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """One group's members and what its baseline came to."""

    trajectories: tuple[TrajectoryTerms, ...]
    has_spread: bool
    has_gradient: bool
    baseline_minus_mean: float


class GradientSums:
    """The step's sum and the open group's score sum, float32, one tensor per parameter."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.total = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        self._scores = [torch.zeros_like(total) for total in self.total]

    def reset(self) -> None:
        """Start a step."""
        for buffer in (*self.total, *self._scores):
            buffer.zero_()

    def add(self, gradients: Sequence[Tensor], *, coefficient: float, score: float) -> None:
        """total += coefficient * gradients; open group's scores += score * gradients."""
        for total, scores, gradient in zip(self.total, self._scores, gradients, strict=True):
            total.add_(gradient, alpha=coefficient)
            if score:
                scores.add_(gradient, alpha=score)

    def close_group(self, shift: float) -> None:
        """Move the group's baseline by `shift`: total -= shift * scores. The next group starts empty."""
        for total, scores in zip(self.total, self._scores, strict=True):
            total.sub_(scores, alpha=shift)
            scores.zero_()


class Estimator:
    """Adds one group after another to a `GradientSums`, under one algorithm."""

    def __init__(self, model: Any, algorithm: AlgorithmConfig) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._algorithm = algorithm
        self._max_weight = algorithm.max_weight if algorithm.truncation == "truncate" else None
        self._is_optimal = algorithm.baseline == "opob"
        self.sums = GradientSums(self._parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of `sums.total`."""
        return self._parameters

    def truncated(self, log_weight: float) -> float:
        """Log of the weight that the estimator uses."""
        return float(objective.truncated_log_weight(torch.tensor(log_weight, dtype=torch.float64), self._max_weight))

    def add_group(self, group: TrajectoryGroup, *, policy_version: int, num_trajectories: int) -> GroupTerms:
        """Add the group's share of g = 1/B sum_i wbar_i (R_i - b_i)/s grad_i, with B = `num_trajectories`.

        A group without reward spread (or with one member) has no gradient under a baseline or a standard deviation;
        its members are still scored, since their weights count in rho. Nothing is raised for NaN or infinities: see
        `TrajectoryTerms.non_finite`, by which the step must be refused.
        """
        reward_G = torch.tensor(group.rewards_G, dtype=torch.float64)
        has_spread = objective.has_spread(reward_G)
        wants_spread = self._algorithm.baseline != "none" or self._algorithm.normalize_by_std
        has_gradient = has_spread or not wants_spread
        baseline_G = self._reference_baseline(reward_G) if has_gradient else reward_G
        std = float(objective.reward_std(reward_G)) if has_gradient and self._algorithm.normalize_by_std else 1.0
        scale = 1 / (std * num_trajectories)
        members = [
            self._add_member(member, policy_version, scale, float(member.reward - baseline) if has_gradient else None)
            for member, baseline in zip(group.trajectories, baseline_G, strict=True)
        ]
        shift = self._close_group(members, reward_G)
        return GroupTerms(
            trajectories=tuple(members),
            has_spread=has_spread,
            has_gradient=any(member.score_norm > 0 for member in members),
            baseline_minus_mean=float((baseline_G - reward_G).mean()) + shift,
        )

    def _reference_baseline(self, reward_G: Tensor) -> Tensor:
        match self._algorithm.baseline:
            case "opob" | "mean":
                return objective.mean_baseline(reward_G)
            case "leave_one_out":
                return objective.leave_one_out_baseline(reward_G)
            case "none":
                return torch.zeros_like(reward_G)

    def _add_member(
        self, trajectory: Trajectory, policy_version: int, scale: float, advantage: float | None
    ) -> TrajectoryTerms:
        tensors = action_tensors(trajectory, self._parameters[0].device)
        num_actions = len(tensors.target_N)
        wants_gradient = advantage is not None and num_actions > 0
        with torch.set_grad_enabled(wants_gradient):
            logprob_N, entropy_N = action_logprobs(self._model, tensors)
        log_ratio_N = logprob_N.detach().double() - tensors.behavior_logprob_N
        log_weight = float(objective.sequence_log_weight(logprob_N.detach(), tensors.behavior_logprob_N))
        log_used = self.truncated(log_weight)
        weight = math.exp(log_used) if log_used < LARGEST_LOG_WEIGHT else math.inf
        score_norm = 0.0
        if advantage is not None and num_actions > 0:
            length = num_actions if self._algorithm.normalize_by_length else 1
            gradients = [g.float() for g in torch.autograd.grad(logprob_N.sum() / length, self._parameters)]
            score_norm = float(torch.nn.utils.get_total_norm(gradients))
            if math.isfinite(weight):
                score = weight * scale if self._is_optimal else 0.0
                self.sums.add(gradients, coefficient=weight * scale * advantage, score=score)
        same_N = log_ratio_N[tensors.policy_version_N == policy_version]
        error_N = same_N.abs()
        return TrajectoryTerms(
            id=trajectory.id,
            reward=trajectory.reward,
            log_weight=log_weight,
            weight=weight,
            score_norm=score_norm,
            lag=policy_version - trajectory.policy_version if num_actions else 0,
            num_tokens=len(trajectory.token_ids()),
            num_action_tokens=num_actions,
            kl_sum=float(objective.behavior_kl(log_ratio_N).sum()),
            entropy_sum=float(entropy_N.double().sum()),
            num_parity_tokens=len(error_N),
            parity_sum=float(error_N.sum()),
            parity_max=float(error_N.max()) if len(error_N) else 0.0,
            parity_kl_sum=float(objective.behavior_kl(same_N).sum()),
        )

    def _close_group(self, members: Sequence[TrajectoryTerms], reward_G: Tensor) -> float:
        """Move from the reference baseline to b*. Returns b* - mean R; 0.0 where there is nothing to move."""
        if not self._is_optimal or any(member.non_finite() for member in members):
            return 0.0
        optimum = vcpo.optimal_baseline(
            torch.tensor([self.truncated(member.log_weight) for member in members], dtype=torch.float64),
            torch.tensor([member.score_norm for member in members], dtype=torch.float64),
            reward_G,
        )
        shift = 0.0 if optimum is None else float(optimum - reward_G.mean())
        self.sums.close_group(shift)
        return shift
