"""A step's policy gradient: which packs go through which passes, and what the groups come to.

    g = 1/B sum_i c_i A_i / L_i sum_t w_it grad log pi(a_it)    (objective/policy_gradient.py has A, L and w)

B episodes, each of one or several trajectories i with shares c_i (`Trajectory.weight`): advantages, standard deviations
and baselines are of episodes, weights and norms of trajectories. One with c = 0 is scored and has no gradient.

Three ways, by what weights and baseline must know first:
- one pass: a pack's own log-probabilities suffice, its backward follows its forward.
- one pass with norms (baseline opob): packs of one group; its baseline is moved once its norms are known, by the score
  sum that the same backward left beside the gradient:  g -= (b* - b_0) sum_i w_i/(s B) score_i.
- two passes: all is scored first, with norms by proxy if so set; then weights and baselines; then every pack again.

Knows nothing of DeepSpeed, but that ZeRO-3 wants every rank to make as many passes as the others.
Shapes: _E episodes of a group, _G its trajectories, _N action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import Trajectory, TrajectoryGroup, has_spread
from trainer import packing
from trainer.gradient.passes import Passes, Run
from trainer.gradient.score_sums import GradientSums
from trainer.objective import estimates as objective
from trainer.objective import ratios
from trainer.objective.policy_gradient import Member, MemberWeights, Objective
from trainer.packing import action_tensors
from trainer.step_stats import GroupTerms, TrajectoryTerms

__all__ = ["LARGEST_LOG_WEIGHT", "Estimator", "GradientSums", "GroupTerms", "TrajectoryTerms"]

LARGEST_LOG_WEIGHT = ratios.LARGEST_LOG_WEIGHT
DEFAULT_PACK_TOKENS = 8192

_SILENT = MemberWeights(
    weight_N=torch.zeros(0, dtype=torch.float64), log_weight=0.0, log_used=0.0, num_clipped=0, num_weights=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A group on its way through a step."""

    episodes: list[list[Run]]
    reward_E: Tensor  # float64, one an episode
    has_advantages: bool

    @property
    def runs(self) -> list[Run]:
        return [run for episode in self.episodes for run in episode]

    @property
    def trained(self) -> list[Run]:
        return [run for run in self.runs if run.is_trained] if self.has_advantages else []

    @property
    def idle(self) -> list[Run]:
        """Those that act and have no gradient: they are scored, since their weights count in rho."""
        return [run for run in self.runs if run.tensors.num_actions and not (self.has_advantages and run.is_trained)]


class Estimator:
    """Turns whole groups into a `GradientSums`, under one algorithm.

    `gather` collects a list over ranks, rank by rank; alone there is nothing to collect.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        *,
        pack_tokens: int = DEFAULT_PACK_TOKENS,
        gather: Callable[[list[Any], Any], list[Any]] = lambda records, kind: records,
    ) -> None:
        self._device: torch.device = model.device
        self._objective = Objective(algorithm)
        self._pack_tokens = pack_tokens
        self._gather = gather
        self._has_norms = self._objective.needs_norms and algorithm.baseline_norms == "exact"
        self._has_proxies = self._objective.needs_norms and algorithm.baseline_norms == "proxy"
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """The trained parameters, in the order of `sums.total`."""
        self.sums = GradientSums(self.parameters, has_scores=self._has_norms)
        self._passes = Passes(model, self.sums)

    def estimate(
        self, groups: Sequence[TrajectoryGroup], *, policy_version: int, num_episodes: int
    ) -> list[GroupTerms]:
        """Leave these groups' share of g in `sums`, with B = `num_episodes`; one record a group, in their order.

        A group without reward spread (or with one member) has no gradient under a baseline or a standard deviation;
        its members are still scored, since their weights count in rho. Nothing is raised for NaN or infinities: see
        `TrajectoryTerms.non_finite`, by which the step must be refused.
        """
        self.sums.reset()
        drafts = [self._draft(group) for group in groups]
        active = [draft for draft in drafts if draft.has_advantages]
        idle = [run for draft in drafts for run in draft.idle]
        if self._has_norms:
            self._one_pass_with_norms(active, num_episodes)
            self._idle_pass(idle)
        elif self._objective.needs_batch or self._has_proxies:
            self._two_passes(active, idle, num_episodes)
        else:
            self._plain_pass(active, num_episodes)
            self._idle_pass(idle)
        return [_group_terms(draft, policy_version, self._objective) for draft in drafts]

    def _draft(self, group: TrajectoryGroup) -> _Draft:
        episodes = [episode.segments for episode in group.episodes]
        reward_E = torch.tensor(group.episode_rewards, dtype=torch.float64)
        advantage_E = self._objective.advantages(reward_E, torch.tensor([_num_actions(one) for one in episodes]))
        scale = self._objective.score_scale(reward_E)
        members = [(index, one) for index, segments in enumerate(episodes) for one in segments]
        length_G = self._objective.lengths(
            torch.tensor([one.num_action_tokens for _, one in members]),
            share_G=torch.tensor([one.weight for _, one in members], dtype=torch.float64),
            num_episodes=len(episodes),
        )
        runs: list[list[Run]] = [[] for _ in episodes]
        for index, (episode, member) in enumerate(members):
            run = Run(
                trajectory=member,
                tensors=action_tensors(member, self._device),
                group_id=group.group_id,
                index=index,
                advantage=None if advantage_E is None else float(advantage_E[episode]),
                score_scale=scale,
                length=float(length_G[index]),
                weights=None if member.num_action_tokens else _SILENT,
            )
            runs[episode].append(run)
        return _Draft(episodes=runs, reward_E=reward_E, has_advantages=advantage_E is not None)

    def _weigh(self, run: Run) -> None:
        if run.weights is None:
            run.weights = self._objective.weights(run.log_ratio_N, run.advantage or 0.0)

    def _packed(self, runs: Sequence[Run]) -> list[list[Run]]:
        plan = packing.plan([run.tensors.num_read for run in runs], self._pack_tokens)
        return [[runs[index] for index in indices] for indices in plan]

    def _each(self, packs: Sequence[list[Run]], make_pass: Callable[[list[Run]], None]) -> None:
        """A pass a pack. Where ZeRO-3 divides weights among ranks, as many as the rank with the most packs makes."""
        is_divided = any(hasattr(parameter, "ds_shape") for parameter in self.parameters)
        # Asked before the first pass: in a pass every rank waits for the others' weights.
        num_passes = max(self._gather([len(packs)], int)) if is_divided else len(packs)
        for runs in packs:
            make_pass(runs)
        for _ in range(num_passes - len(packs)):
            make_pass([])

    def _idle_pass(self, runs: Sequence[Run]) -> None:
        self._each(self._packed(runs), self._passes.scored)
        for run in runs:
            self._weigh(run)

    def _plain_pass(self, active: Sequence[_Draft], num_episodes: int) -> None:
        acting = [run for draft in active for run in draft.trained]
        self._each(
            self._packed(acting),
            lambda runs: self._passes.plain(runs, self._weigh, num_episodes=num_episodes),
        )

    def _one_pass_with_norms(self, active: Sequence[_Draft], num_episodes: int) -> None:
        packs = [(runs, draft) for draft in active for runs in self._packed(draft.trained)]
        draft_of = {id(runs): draft for runs, draft in packs}
        ends = {id(draft): id(runs) for runs, draft in packs}

        def make_pass(runs: list[Run]) -> None:
            self._passes.split(runs, self._weigh, num_episodes=num_episodes)
            if runs and ends[id(draft := draft_of[id(runs)])] == id(runs):
                self.sums.close_group(self._move_baseline(draft))

        self._each([runs for runs, _ in packs], make_pass)

    def _two_passes(self, active: Sequence[_Draft], idle: Sequence[Run], num_episodes: int) -> None:
        acting = [run for draft in active for run in draft.trained]
        self._each(self._packed(acting), self._passes.proxies if self._has_proxies else self._passes.scored)
        self._each(self._packed(idle), self._passes.scored)
        if self._objective.needs_batch:
            self._weigh_batch([*acting, *idle])
        for run in (*acting, *idle):
            self._weigh(run)
        if self._has_proxies:
            for draft in active:
                self._move_baseline(draft)
        self._plain_pass(active, num_episodes)

    def _weigh_batch(self, runs: Sequence[Run]) -> None:
        """Weights that depend on every trajectory of the step, of all ranks: each rank computes all of them alike."""
        mine = [((run.group_id, run.index), _member(run)) for run in runs]
        everyone = sorted(self._gather(mine, tuple[tuple[int, int], Member]), key=lambda pair: pair[0])
        weights = self._objective.batch_weights([member for _, member in everyone])
        found = {key: one for (key, _), one in zip(everyone, weights, strict=True)}
        for run in runs:
            run.weights = found[run.group_id, run.index]

    def _move_baseline(self, draft: _Draft) -> float:
        """From the reference baseline to b*, in its members' advantages. Returns b* - b_0; 0.0 where there is none."""
        numbers = [x for run in draft.trained for x in (run.used.log_weight, run.score_norm, run.weight)]
        if not all(map(math.isfinite, numbers)) or not bool(draft.reward_E.isfinite().all()):
            return 0.0
        sizes = [_joint_size(episode, self._objective.log_in_baseline) for episode in draft.episodes]
        log_weight_E, norm_E = torch.tensor(sizes, dtype=torch.float64).unbind(dim=1)
        optimum = self._objective.baseline(log_weight_E, norm_E, draft.reward_E)
        shift = 0.0 if optimum is None else float(optimum - draft.reward_E.mean())
        for run in draft.runs:
            if run.advantage is not None:
                run.advantage -= shift * run.score_scale
        return shift


def _num_actions(segments: Sequence[Trajectory]) -> int:
    return sum(segment.num_action_tokens for segment in segments)


def _joint_size(segments: Sequence[Run], log_of: Callable[[MemberWeights], float]) -> tuple[float, float]:
    """log w and n of an episode with w^2 n^2 = sum of its segments', taking their scores for orthogonal."""
    sizes = [(log_of(run.used), run.score_norm) for run in segments if run.is_trained]
    largest = max((log_weight for log_weight, _ in sizes), default=-math.inf)
    if largest == -math.inf:  # nothing of it is in the gradient
        return 0.0, 0.0
    return largest, math.hypot(*(math.exp(log_weight - largest) * norm for log_weight, norm in sizes))


def _member(run: Run) -> Member:
    return Member(
        log_ratio_N=run.log_ratio_N,
        advantage=run.advantage or 0.0,
        reward=run.trajectory.reward,
        group=run.group_id,
        logit_norm2_N=run.logit_norm2_N,
    )


def _group_terms(draft: _Draft, policy_version: int, family: Objective) -> GroupTerms:
    has_gradient = bool(draft.trained)
    if family.needs_norms:
        has_gradient = has_gradient and any(run.score_norm > 0 for run in draft.runs)
    shifts = []
    if has_gradient and not family.needs_logits:  # a baseline a token is no number of the group
        firsts = [episode[0] for episode in draft.episodes]
        shifts = [run.trajectory.reward - (run.advantage or 0.0) / run.score_scale for run in firsts]
    return GroupTerms(
        trajectories=tuple(
            _terms(run, policy_version, episode=number) for number, runs in enumerate(draft.episodes) for run in runs
        ),
        has_spread=has_spread(draft.reward_E.tolist()),
        has_gradient=has_gradient,
        baseline_minus_mean=sum(shifts) / len(shifts) - float(draft.reward_E.mean()) if shifts else 0.0,
    )


def _terms(run: Run, policy_version: int, *, episode: int) -> TrajectoryTerms:
    trajectory, tensors = run.trajectory, run.tensors
    same_N = run.log_ratio_N[tensors.policy_version_N == policy_version]
    error_N = same_N.abs()
    return TrajectoryTerms(
        id=trajectory.id,
        episode=episode,
        reward=trajectory.reward,
        log_weight=run.used.log_weight,
        weight=run.weight,
        num_clipped=run.used.num_clipped,
        num_weights=run.used.num_weights,
        advantage=run.advantage or 0.0,
        score_norm=run.score_norm,
        lag=policy_version - trajectory.policy_version if tensors.num_actions else 0,
        num_tokens=len(trajectory.token_ids()),
        num_action_tokens=tensors.num_actions,
        kl_sum=float(objective.behavior_kl(run.log_ratio_N).sum()),
        entropy_sum=run.entropy_sum,
        num_parity_tokens=len(error_N),
        parity_sum=float(error_N.sum()),
        parity_max=float(error_N.max()) if len(error_N) else 0.0,
        parity_kl_sum=float(objective.behavior_kl(same_N).sum()),
    )
