"""Trajectories and groups on their way through a step: what the passes find out about them, and their statistics.

Independent of models, packs and of how gradients are made.
Shapes: _E episodes of a group, _N action tokens of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.report.learner_notes import TokenNotes
from agentrl.report.statistics import has_spread
from agentrl.types import Trajectory
from trainer.objective import ratios
from trainer.objective.interface import Member, MemberWeights, Objective, Turns
from trainer.packing import ActionTensors
from trainer.step_stats import PARITY_BLOCK, GroupStats, TrajectoryStats

_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(slots=True, kw_only=True)
class ScoredTrajectory:
    """One trajectory of a step: its tensors, its part in the objective, and what the passes measure of it.

    Example: `(one.weights,) = calls.weigh(objective, [one.member()])`, once it was scored.
    """

    trajectory: Trajectory
    tensors: ActionTensors
    group_id: int
    index: int  # in its group
    episode: int  # the index in its group of the episode that it is, or is a segment of
    num_episodes: int  # of its group
    step: int  # optimizer steps made before this one
    score_scale: float  # 1/s
    length: float  # L / c, by which its summed score is divided
    turns: Turns | None = None  # if the objective needs them
    advantage: float | None = None  # about the reference baseline; None: its group has no gradient
    advantage_N: Tensor | None = None  # float64, where the objective gives one a token; `advantage` is their mean
    log_ratio_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, log pi - log mu, on the CPU
    logit_norm2_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, see baselines.logit_norm2
    entropy_N: Tensor = field(default_factory=lambda: _NOTHING)  # float64, nats, on the CPU
    reference_logprob_N: Tensor | None = None  # float64, on the CPU, under the frozen model if the objective needs it
    weights: MemberWeights | None = None
    score_norm: float = 0.0  # of its score / length
    baseline_share: float | None = None  # of its episode in b*, where there is one

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
        """d objective / d log pi of each action token, (w A + e) / (B L); zeros where a number is not finite. float64

        w is its weight, A its advantage, e the seed of further terms (trainer/objective/interface.py).
        """
        advantage = (self.advantage or 0.0) if self.advantage_N is None else self.advantage_N
        seed_N = self.used.weight_N * (advantage / (self.length * num_episodes))
        if self.used.logprob_seed_N is not None:
            seed_N = seed_N + self.used.logprob_seed_N / (self.length * num_episodes)
        return seed_N if bool(seed_N.isfinite().all()) else torch.zeros_like(seed_N)

    def entropy_seed_N(self, num_episodes: int) -> Tensor:
        """d objective / d entropy of each action token, h / (B L); zeros where a number is not finite. float64"""
        seed_N = self.used.entropy_seed_N
        if seed_N is None or not bool(seed_N.isfinite().all()):
            return torch.zeros(self.tensors.num_actions, dtype=torch.float64)
        return seed_N.double() / (self.length * num_episodes)

    def member(self) -> Member:
        """What the objective is given of it."""
        return Member(
            log_ratio_N=self.log_ratio_N,
            advantage=self.advantage or 0.0,
            reward=self.trajectory.reward,
            group=self.group_id,
            episode=self.episode,
            num_episodes=self.num_episodes,
            advantage_N=self.advantage_N,
            logprob_N=self.log_ratio_N + self.tensors.behavior_logprob_N,
            entropy_N=self.entropy_N,
            logit_norm2_N=self.logit_norm2_N,
            reference_logprob_N=self.reference_logprob_N,
            turns=self.turns,
            step=self.step,
        )

    def require_one_coefficient(self, objective: Objective) -> None:
        """Raise ConfigError unless its gradient is one number times its score, as exact norms in one pass take it."""
        used = self.used
        has_terms = used.logprob_seed_N is not None or used.entropy_seed_N is not None
        is_even = self.advantage_N is None and bool((used.weight_N == used.weight_N[:1]).all())
        if has_terms or not (is_even or bool(used.weight_N.isnan().any())):
            what = (
                "further terms" if has_terms else "weights or advantages that differ among the tokens of a trajectory"
            )
            raise ConfigError(
                f"algorithm.objective: {type(objective).__name__} has {what}, which exact score norms in one pass do "
                "not take: set has_terms = True in the class, so that the norms are measured first"
            )

    def _broken_parts(self) -> tuple[str, ...]:
        """Names of what the objective gave for it that is not finite."""
        seeds = (self.used.logprob_seed_N, self.used.entropy_seed_N)
        terms = sum(float(one.sum()) for one in seeds if one is not None)
        parts = {"advantage": self.advantage or 0.0, "terms": terms}
        return tuple(f"{name} of algorithm.objective" for name, value in parts.items() if not math.isfinite(value))

    def _reference_kl_sum(self) -> float | None:
        if self.reference_logprob_N is None:
            return None
        return float((self.log_ratio_N + self.tensors.behavior_logprob_N - self.reference_logprob_N).sum())

    def _token_notes(self) -> TokenNotes:
        advantage_N = _NOTHING if self.advantage_N is None else self.advantage_N
        return TokenNotes(
            log_ratio_N=_short(self.log_ratio_N),
            weight_N=_short(self.used.weight_N),
            advantage_N=_short(advantage_N),
            entropy_N=_short(self.entropy_N),
        )

    def stats(self, policy_version: int, *, is_sound: bool, has_tokens: bool) -> TrajectoryStats:
        """Its numbers for diagnostics, once the learner's passes at `policy_version` are done.

        `is_sound`: all rewards of its group are finite, so that the objective answers for what is not. `has_tokens`:
        with the numbers of its tokens.
        """
        trajectory, tensors = self.trajectory, self.tensors
        same_N = self.log_ratio_N[tensors.policy_version_N == policy_version]
        error_N = same_N.abs()
        return TrajectoryStats(
            id=trajectory.id,
            episode=self.episode,
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
            reference_kl_sum=self._reference_kl_sum(),
            num_parity_tokens=len(error_N),
            parity_sum=float(error_N.sum()),
            parity_max=float(error_N.max()) if len(error_N) else 0.0,
            parity_kl_sum=float(ratios.behavior_kl(same_N).sum()),
            parity_square_sum=float(same_N.square().sum()),
            parity_blocks=_block_sums(same_N),
            num_silenced=self.used.num_silenced,
            baseline_share=self.baseline_share,
            tokens=self._token_notes() if has_tokens else None,
            broken_parts=self._broken_parts() if is_sound else (),
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

    def move_baseline(self, objective: Objective) -> Tensor:
        """Replace the reference baseline by b* in the members' advantages.

        Returns b* - b_0 of each episode, [E]; zeros where there is no b*, or where a number it needs is not finite.
        """
        numbers = [x for one in self.trained for x in (one.used.log_weight, one.score_norm, one.weight)]
        if not all(map(math.isfinite, numbers)) or not bool(self.reward_E.isfinite().all()):
            return torch.zeros_like(self.reward_E)
        sizes = [_episode_size(episode, objective) for episode in self.episodes]
        log_weight_E, norm_E = torch.tensor(sizes, dtype=torch.float64).unbind(dim=1)
        optimum = objective.baseline(log_weight_E, norm_E, self.reward_E)
        if optimum is not None:
            share_E = torch.softmax(2 * (log_weight_E + norm_E.log()), dim=0)
            for member in self.members:
                member.baseline_share = float(share_E[member.episode])
        mean = self.reward_E.mean()
        shift_E = ((mean if optimum is None else optimum) - mean).expand_as(self.reward_E)
        for member in self.members:
            shift = float(shift_E[member.episode]) * member.score_scale
            if member.advantage is not None:
                member.advantage -= shift
            if member.advantage_N is not None:
                member.advantage_N = member.advantage_N - shift
        return shift_E

    def stats(self, policy_version: int, objective: Objective, *, has_tokens: bool = False) -> GroupStats:
        """Its numbers for diagnostics, once its baseline is final. `has_tokens`: also of each token."""
        has_gradient = bool(self.trained)
        if objective.needs_norms:
            has_gradient = has_gradient and any(member.score_norm > 0 for member in self.members)
        baselines, is_sound = [], bool(self.reward_E.isfinite().all())
        firsts = [episode[0] for episode in self.episodes]
        # A baseline per token is no number of the group.
        if has_gradient and not objective.needs_logits and all(one.advantage_N is None for one in firsts):
            baselines = [one.trajectory.reward - (one.advantage or 0.0) / one.score_scale for one in firsts]
        return GroupStats(
            trajectories=tuple(
                member.stats(policy_version, is_sound=is_sound, has_tokens=has_tokens) for member in self.members
            ),
            has_spread=has_spread(self.reward_E.tolist()),
            has_gradient=has_gradient,
            baseline_minus_mean=sum(baselines) / len(baselines) - float(self.reward_E.mean()) if baselines else 0.0,
        )


def give_advantage(segments: Sequence[ScoredTrajectory], advantage: Tensor) -> None:
    """Set an episode's advantage, one number or one for each action token, in its segments."""
    if not advantage.ndim:
        for one in segments:
            one.advantage = float(advantage)
        return
    parts = torch.split(advantage, [one.tensors.num_actions for one in segments])
    for one, advantage_N in zip(segments, parts, strict=True):
        one.advantage = float(advantage_N.mean()) if len(advantage_N) else 0.0
        one.advantage_N = advantage_N


def _short(value_N: Tensor) -> tuple[float, ...]:
    """Four digits of each, for people to look at."""
    return tuple(float(f"{value:.4g}") for value in value_N.tolist())


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
