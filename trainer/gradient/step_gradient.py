"""A step's policy gradient: which packs go through which passes, and what each group contributes.

    g = 1/B sum_i c_i A_i / L_i sum_t w_it grad log pi(a_it)    (objective/policy_gradient.py defines A, L and w)

B episodes, each of one or several trajectories i with shares c_i (`Trajectory.weight`). Advantages, standard deviations
and baselines belong to episodes, weights and norms to trajectories. A trajectory with c = 0 is scored and has no
gradient.

There are three ways, depending on what weights and baseline must know first:
- one pass: a pack's own log-probabilities suffice, its backward follows its forward.
- one pass with norms (baseline opob): packs hold one group; once its norms are measured its baseline is moved, by means
  of the score sum that the same backward left beside the gradient:  g -= (b* - b_0) sum_i w_i/(s B) score_i.
- two passes: everything is scored first, with norms by proxy if so configured; then weights and baselines are computed;
  then every pack is differentiated.

Independent of DeepSpeed, except that under ZeRO-3 every rank must make the same number of passes.
Shapes: _E episodes of a group, _G its trajectories, _N action tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import Trajectory, TrajectoryGroup
from trainer import packing
from trainer.gradient.passes import Passes
from trainer.gradient.scored import ScoredGroup, ScoredTrajectory
from trainer.gradient.sums import GradientSums
from trainer.objective.policy_gradient import Member, MemberWeights, Objective
from trainer.packing import action_tensors
from trainer.ranks import is_divided
from trainer.step_stats import GroupStats

DEFAULT_PACK_TOKENS = 8192

_WITHOUT_ACTIONS = MemberWeights(
    weight_N=torch.zeros(0, dtype=torch.float64), log_weight=0.0, log_used=0.0, num_clipped=0, num_weights=0
)


class Estimator:
    """Turns whole groups into a `GradientSums` under one algorithm.

    Example::

        estimator = Estimator(model, AlgorithmConfig(preset="vcpo"))
        stats = estimator.estimate(groups, policy_version=3, num_episodes=64)
        gradient = [estimator.sums.take(index) for index in range(len(estimator.parameters))]

    Args:
        model: on which `attention.install` was called.
        pack_tokens: budget of a pack; a longer trajectory has a pack of its own.
        gather: collects a list over ranks, in the order of ranks; the identity for a single rank.
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
    ) -> list[GroupStats]:
        """Leave these groups' share of g in `sums`, with B = `num_episodes`. One record per group, in their order.

        A group without reward spread (or with one member) has no gradient under a baseline or a standard deviation;
        its members are still scored, since their weights count in rho. NaN and infinities raise nothing: see
        `TrajectoryStats.non_finite`, by which the step must be refused.
        """
        self.sums.reset()
        scored = [self._scored(group) for group in groups]
        active = [group for group in scored if group.has_advantages]
        idle = [member for group in scored for member in group.idle]
        if self._has_norms:
            self._one_pass_with_norms(active, num_episodes)
            self.sums.drop_scores()
            self._idle_pass(idle)
        elif self._objective.needs_batch or self._has_proxies:
            self._two_passes(active, idle, num_episodes)
        else:
            self._plain_pass(active, num_episodes)
            self._idle_pass(idle)
        return [group.stats(policy_version, self._objective) for group in scored]

    def _scored(self, group: TrajectoryGroup) -> ScoredGroup:
        episodes = [episode.segments for episode in group.episodes]
        reward_E = torch.tensor(group.episode_rewards, dtype=torch.float64)
        advantage_E = self._objective.advantages(reward_E, torch.tensor([_num_actions(one) for one in episodes]))
        scale = self._objective.score_scale(reward_E)
        trajectories = [(episode, one) for episode, segments in enumerate(episodes) for one in segments]
        length_G = self._objective.lengths(
            torch.tensor([one.num_action_tokens for _, one in trajectories]),
            share_G=torch.tensor([one.weight for _, one in trajectories], dtype=torch.float64),
            num_episodes=len(episodes),
        )
        members: list[list[ScoredTrajectory]] = [[] for _ in episodes]
        for index, (episode, trajectory) in enumerate(trajectories):
            member = ScoredTrajectory(
                trajectory=trajectory,
                tensors=action_tensors(trajectory, self._device),
                group_id=group.group_id,
                index=index,
                advantage=None if advantage_E is None else float(advantage_E[episode]),
                score_scale=scale,
                length=float(length_G[index]),
                weights=None if trajectory.num_action_tokens else _WITHOUT_ACTIONS,
            )
            members[episode].append(member)
        return ScoredGroup(episodes=members, reward_E=reward_E, has_advantages=advantage_E is not None)

    def _weigh(self, member: ScoredTrajectory) -> None:
        if member.weights is None:
            member.weights = self._objective.weights(member.log_ratio_N, member.advantage or 0.0)

    def _packed(self, members: Sequence[ScoredTrajectory]) -> list[list[ScoredTrajectory]]:
        plan = packing.plan([member.tensors.num_read for member in members], self._pack_tokens)
        return [[members[index] for index in indices] for indices in plan]

    def _each(
        self, packs: Sequence[list[ScoredTrajectory]], make_pass: Callable[[list[ScoredTrajectory]], None]
    ) -> None:
        """One pass per pack; where ZeRO-3 divides weights, as many as the rank with the most packs makes."""
        has_divided = any(is_divided(parameter) for parameter in self.parameters)
        # Gathered before the first pass: in a pass every rank waits for the others' weights.
        num_passes = max(self._gather([len(packs)], int)) if has_divided else len(packs)
        for pack in packs:
            make_pass(pack)
        for _ in range(num_passes - len(packs)):
            make_pass([])

    def _idle_pass(self, idle: Sequence[ScoredTrajectory]) -> None:
        self._each(self._packed(idle), self._passes.forward_only)
        for member in idle:
            self._weigh(member)

    def _plain_pass(self, active: Sequence[ScoredGroup], num_episodes: int) -> None:
        trained = [member for group in active for member in group.trained]
        self._each(
            self._packed(trained),
            lambda pack: self._passes.plain(pack, self._weigh, num_episodes=num_episodes),
        )

    def _one_pass_with_norms(self, active: Sequence[ScoredGroup], num_episodes: int) -> None:
        packs = [(pack, group) for group in active for pack in self._packed(group.trained)]
        group_of = {id(pack): group for pack, group in packs}
        last_pack_of = {id(group): id(pack) for pack, group in packs}

        def make_pass(pack: list[ScoredTrajectory]) -> None:
            self._passes.with_norms(pack, self._weigh, num_episodes=num_episodes)
            if pack and last_pack_of[id(group := group_of[id(pack)])] == id(pack):
                self.sums.close_group(group.move_baseline(self._objective))

        self._each([pack for pack, _ in packs], make_pass)

    def _two_passes(self, active: Sequence[ScoredGroup], idle: Sequence[ScoredTrajectory], num_episodes: int) -> None:
        trained = [member for group in active for member in group.trained]
        self._each(self._packed(trained), self._passes.proxy_norms if self._has_proxies else self._passes.forward_only)
        self._each(self._packed(idle), self._passes.forward_only)
        if self._objective.needs_batch:
            self._weigh_batch([*trained, *idle])
        for member in (*trained, *idle):
            self._weigh(member)
        if self._has_proxies:
            for group in active:
                group.move_baseline(self._objective)
        self._plain_pass(active, num_episodes)

    def _weigh_batch(self, members: Sequence[ScoredTrajectory]) -> None:
        """Weights that depend on every trajectory of the step, on all ranks: each rank computes all of them alike."""
        mine = [((member.group_id, member.index), member.member()) for member in members]
        everyone = sorted(self._gather(mine, tuple[tuple[int, int], Member]), key=lambda pair: pair[0])
        weights = self._objective.batch_weights([member for _, member in everyone])
        found = {key: one for (key, _), one in zip(everyone, weights, strict=True)}
        for member in members:
            member.weights = found[member.group_id, member.index]


def _num_actions(segments: Sequence[Trajectory]) -> int:
    return sum(segment.num_action_tokens for segment in segments)
