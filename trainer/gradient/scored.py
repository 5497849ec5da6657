"""Trajectories and groups on their way through a step: what the passes find out about them, and their statistics.

Independent of models, packs and of how gradients are made.
Shapes: _E episodes of a group, _N action tokens of a trajectory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.report.statistics import has_spread
from agentrl.types import Trajectory
from trainer.objective import ratios
from trainer.objective.policy_gradient import Member, MemberWeights, Objective
from trainer.packing import ActionTensors
from trainer.step_stats import PARITY_BLOCK, GroupStats, TrajectoryStats

_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(slots=True, kw_only=True)
class ScoredTrajectory:
    """One trajectory of a step: its tensors, its part in the objective, and what the passes measure of it.

    Example: `objective.weights(one.log_ratio_N, advantage=one.advantage)` gives `one.weights`, once it was scored.
    """

    trajectory: Trajectory
    tensors: ActionTensors
    group_id: int
    index: int  # in its group
    advantage: float | None  # about the reference baseline; None: its group has no gradient
    score_scale: float  # 1/s
    length: float  # L / c, by which its summed score is divided
    log_ratio_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, log pi - log mu, on the CPU
    logit_norm2_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, see baselines.logit_norm2
    entropy_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, nats, on the CPU
    weights: MemberWeights | None = None
    score_norm: float = 0.0  # of its score / length

    @property
    def used(self) -> MemberWeights:
        """Its weights, which must have been computed."""
        assert self.weights is not None, f"{self.trajectory.id} has no weights yet"
        return self.weights

    @property
    def is_trained(self) -> bool:
        """Whether it contributes to the gradient, provided that its group has one."""
        return bool(self.tensors.num_actions) and self.trajectory.weight > 0

    @property
    def weight(self) -> float:
        """The weight in use: the mean over its tokens' weights; 1 without action tokens."""
        return float(self.used.weight_N.mean()) if self.tensors.num_actions else 1.0

    def seed_N(self, num_episodes: int) -> Tensor:
        """d objective / d log pi_t of each action token, w_t A / (B L); zeros where a number is not finite. float64"""
        seed_N = self.used.weight_N * ((self.advantage or 0.0) / (self.length * num_episodes))
        return seed_N if bool(seed_N.isfinite().all()) else torch.zeros_like(seed_N)

    def member(self) -> Member:
        """What objectives that look at the whole batch are given."""
        return Member(
            log_ratio_N=self.log_ratio_N,
            advantage=self.advantage or 0.0,
            reward=self.trajectory.reward,
            group=self.group_id,
            logit_norm2_N=self.logit_norm2_N,
        )

    def stats(self, policy_version: int, *, episode: int) -> TrajectoryStats:
        """Its numbers for diagnostics, once the learner's passes at `policy_version` are done."""
        trajectory, tensors = self.trajectory, self.tensors
        same_N = self.log_ratio_N[tensors.policy_version_N == policy_version]
        error_N = same_N.abs()
        return TrajectoryStats(
            id=trajectory.id,
            episode=episode,
            reward=trajectory.reward,
            log_weight=self.used.log_weight,
            weight=self.weight,
            num_clipped=self.used.num_clipped,
            num_weights=self.used.num_weights,
            advantage=self.advantage or 0.0,
            score_norm=self.score_norm,
            lag=policy_version - trajectory.policy_version if tensors.num_actions else 0,
            num_tokens=len(trajectory.token_ids()),
            num_action_tokens=tensors.num_actions,
            kl_sum=float(ratios.behavior_kl(self.log_ratio_N).sum()),
            entropy_sum=float(self.entropy_N.sum()),
            num_parity_tokens=len(error_N),
            parity_sum=float(error_N.sum()),
            parity_max=float(error_N.max()) if len(error_N) else 0.0,
            parity_kl_sum=float(ratios.behavior_kl(same_N).sum()),
            parity_square_sum=float(same_N.square().sum()),
            parity_blocks=_block_sums(same_N),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """One group of a step.

    Example: `[member.trajectory.id for member in group.trained]` are the trajectories that have a gradient.
    """

    episodes: list[list[ScoredTrajectory]]
    reward_E: Tensor  # float64
    has_advantages: bool

    @property
    def members(self) -> list[ScoredTrajectory]:
        """All trajectories of all episodes."""
        return [member for episode in self.episodes for member in episode]

    @property
    def trained(self) -> list[ScoredTrajectory]:
        """The trajectories that contribute to the gradient."""
        return [member for member in self.members if member.is_trained] if self.has_advantages else []

    @property
    def idle(self) -> list[ScoredTrajectory]:
        """Those with action tokens and without a gradient. They are scored all the same: their weights count in rho."""
        return [m for m in self.members if m.tensors.num_actions and not (self.has_advantages and m.is_trained)]

    def move_baseline(self, objective: Objective) -> float:
        """Replace the reference baseline by b* in the members' advantages.

        Returns b* - b_0; 0.0 where there is no b*, or where a number it needs is not finite.
        """
        numbers = [x for one in self.trained for x in (one.used.log_weight, one.score_norm, one.weight)]
        if not all(map(math.isfinite, numbers)) or not bool(self.reward_E.isfinite().all()):
            return 0.0
        sizes = [_episode_size(episode, objective) for episode in self.episodes]
        log_weight_E, norm_E = torch.tensor(sizes, dtype=torch.float64).unbind(dim=1)
        optimum = objective.baseline(log_weight_E, norm_E, self.reward_E)
        shift = 0.0 if optimum is None else float(optimum - self.reward_E.mean())
        for member in self.members:
            if member.advantage is not None:
                member.advantage -= shift * member.score_scale
        return shift

    def stats(self, policy_version: int, objective: Objective) -> GroupStats:
        """Its numbers for diagnostics, once its baseline is final."""
        has_gradient = bool(self.trained)
        if objective.needs_norms:
            has_gradient = has_gradient and any(member.score_norm > 0 for member in self.members)
        baselines = []
        if has_gradient and not objective.needs_logits:  # a baseline per token is no number of the group
            firsts = [episode[0] for episode in self.episodes]
            baselines = [one.trajectory.reward - (one.advantage or 0.0) / one.score_scale for one in firsts]
        return GroupStats(
            trajectories=tuple(
                member.stats(policy_version, episode=number)
                for number, episode in enumerate(self.episodes)
                for member in episode
            ),
            has_spread=has_spread(self.reward_E.tolist()),
            has_gradient=has_gradient,
            baseline_minus_mean=sum(baselines) / len(baselines) - float(self.reward_E.mean()) if baselines else 0.0,
        )


def _block_sums(log_ratio_N: Tensor) -> tuple[float, ...]:
    num_whole = len(log_ratio_N) // PARITY_BLOCK
    return tuple(log_ratio_N[: num_whole * PARITY_BLOCK].view(num_whole, PARITY_BLOCK).sum(dim=1).tolist())


def _episode_size(segments: list[ScoredTrajectory], objective: Objective) -> tuple[float, float]:
    """log w and n of an episode: w^2 n^2 = sum of its segments' w_i^2 n_i^2, as if their scores were orthogonal."""
    sizes = [
        (objective.log_in_baseline(one.used), objective.norm_in_baseline(one.score_norm, one.length))
        for one in segments
        if one.is_trained
    ]
    largest = max((log_weight for log_weight, _ in sizes), default=-math.inf)
    if largest == -math.inf:  # no part of it is in the gradient
        return 0.0, 0.0
    return largest, math.hypot(*(math.exp(log_weight - largest) * norm for log_weight, norm in sizes))
