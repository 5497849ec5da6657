"""What every way to a step's gradient shares: groups as scored records, their packs, their weights, their exchange.

Advantages, standard deviations and baselines belong to episodes, weights and norms to trajectories. A trajectory of
weight c = 0 is scored and has no gradient. Independent of passes, sums and DeepSpeed, except that under ZeRO-3 every
rank must make the same number of passes.
Shapes: _E episodes of a group, _G its trajectories, _N action tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.types import Trajectory, TrajectoryGroup
from trainer import packing
from trainer.gradient import attention
from trainer.gradient.scored import ScoredGroup, ScoredTrajectory, give_advantage
from trainer.objective import calls
from trainer.objective.interface import Group, Member, MemberWeights
from trainer.objective.registry import make_objective
from trainer.objective.turn_credit import turns_of
from trainer.packing import ActionTensors, action_tensors
from trainer.ranks import is_divided
from trainer.step_stats import GroupStats

_WITHOUT_ACTIONS = MemberWeights(
    weight_N=torch.zeros(0, dtype=torch.float64), log_weight=0.0, log_used=0.0, num_clipped=0, num_weights=0
)

ReferenceLogprobs = Callable[[Sequence[ActionTensors]], Sequence[Tensor]]
"""log p of each action token of each text under the frozen model (trainer/reference.py). float64 [N], on the CPU."""

Gather = Callable[[list[Any], Any], list[Any]]
"""Collects a list over ranks, in the order of ranks: (records, their type) -> everyone's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank's passes found out about one trajectory.

    Example: `members.exchange(trained, mine)` sends one for each trajectory in `mine` to the other ranks.
    """

    group: int
    index: int
    log_ratio_N: Tensor
    logit_norm2_N: Tensor
    entropy_N: Tensor
    reference_logprob_N: Tensor | None
    score_norm: float


class StepMembers:
    """The trajectories of steps under one algorithm.

    Example::

        members = StepMembers(model, AlgorithmConfig(preset="grpo"), pack_tokens=8192)
        scored = members.scored(groups, policy_version=3)
        members.each(members.packed(scored[0].trained), make_pass)

    Args:
        pack_tokens: budget of a pack; a longer trajectory has a pack of its own.
        gather: the identity for a single rank.
        annotates: whether the numbers of each token of a step are wanted.
        reference: scores packs under the frozen model. Raises ConfigError where the objective needs it and it is None.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        *,
        pack_tokens: int,
        gather: Gather = lambda records, kind: records,
        annotates: Callable[[int], bool] = lambda step: False,
        reference: ReferenceLogprobs | None = None,
    ) -> None:
        self._annotates = annotates
        self.objective = make_objective(algorithm)
        if self.objective.needs_reference and reference is None:
            raise ConfigError(
                f"algorithm.objective={algorithm.objective} needs the log-probabilities of a frozen model: set "
                "model.reference=initial, or model.reference=PATH"
            )
        self._reference = reference if self.objective.needs_reference else None
        self.parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
        """The trained parameters."""
        self._device: torch.device = model.device
        # A model that cannot be given packs reads one trajectory at a time: see trainer/startup_proof.py.
        self._pack_tokens = pack_tokens if attention.is_installed(model) else 1
        self._gather = gather

    def scored(self, groups: Sequence[TrajectoryGroup], *, policy_version: int) -> list[ScoredGroup]:
        """The groups with their advantages, lengths and input tensors; nothing is scored yet."""
        return [self._scored(group, policy_version) for group in groups]

    def stats(self, groups: Sequence[ScoredGroup], policy_version: int) -> list[GroupStats]:
        """Statistics of groups whose trajectories all have weights, once their baselines are final."""
        has_tokens = self._annotates(policy_version + 1)
        return [group.stats(policy_version, self.objective, has_tokens=has_tokens) for group in groups]

    def packed(self, members: Sequence[ScoredTrajectory]) -> list[list[ScoredTrajectory]]:
        """The trajectories in as few packs as the budget of tokens allows."""
        plan = packing.plan([member.tensors.num_read for member in members], self._pack_tokens)
        return [[members[index] for index in indices] for indices in plan]

    def each(
        self,
        packs: Sequence[list[ScoredTrajectory]],
        make_pass: Callable[[list[ScoredTrajectory]], None],
        *,
        is_joint: bool = False,
    ) -> None:
        """One pass per pack. Where ranks wait for each other inside a pass, as many as the rank with the most packs
        makes, the missing ones over no trajectory: where ZeRO-3 divides weights, or where `is_joint`.
        """
        if is_joint or any(is_divided(parameter) for parameter in self.parameters):
            num_passes = max(self._gather([len(packs)], int))
        else:
            num_passes = len(packs)
        for pack in packs:
            make_pass(pack)
        for _ in range(num_passes - len(packs)):
            make_pass([])

    def score_reference(self, members: Sequence[ScoredTrajectory]) -> None:
        """Fill in the frozen model's log-probabilities, where the objective needs them.

        Call it on every rank, with the trajectories that this rank computes, before any is weighed.
        """
        if self._reference is not None:
            self.each(self.packed([one for one in members if one.tensors.num_actions]), self._reference_pass)

    def _reference_pass(self, members: Sequence[ScoredTrajectory]) -> None:
        assert self._reference is not None
        texts = [one.tensors for one in members] or [packing.shortest(self._device)]
        for one, logprob_N in zip(members, self._reference(texts), strict=False):  # the shortest has no member
            one.reference_logprob_N = logprob_N

    def spread(self, members: Sequence[ScoredTrajectory], *, rank: int, num_ranks: int) -> list[ScoredTrajectory]:
        """Those of `members` that one rank computes: single trajectories are dealt out, balanced by tokens."""
        shares = packing.spread([member.tensors.num_read for member in members], num_ranks)
        return [members[index] for index in shares[rank]]

    def evenly(self, packs: Sequence[list[ScoredTrajectory]]) -> list[list[ScoredTrajectory]]:
        """The packs, and empty ones after them: as many as the rank with the most packs has, at least one."""
        num_passes = max(1, *self._gather([len(packs)], int))
        return [*packs, *([] for _ in range(num_passes - len(packs)))]

    def weigh(self, member: ScoredTrajectory) -> None:
        """Set the weights of a trajectory that was scored, unless it has them."""
        if member.weights is None:
            (member.weights,) = calls.weigh(self.objective, [member.member()])

    def weigh_as_one(self, member: ScoredTrajectory) -> None:
        """The same for passes with one coefficient for a trajectory. Raises ConfigError where its tokens differ."""
        self.weigh(member)
        member.require_one_coefficient(self.objective)

    def weigh_all(self, members: Sequence[ScoredTrajectory], *, is_everyone: bool = False) -> None:
        """Set the weights of all the step's trajectories on this rank, also where they depend on the whole batch.

        Every rank must call it, once everything is scored. `is_everyone`: `members` are those of all ranks.
        """
        if self.objective.needs_batch:
            self._weigh_batch(members, is_everyone=is_everyone)
        for member in members:
            self.weigh(member)

    def exchange(self, members: Sequence[ScoredTrajectory], mine: Sequence[ScoredTrajectory]) -> None:
        """Send what was measured of `mine` to all ranks, and fill in `members` from what they send.

        Every rank must call it with the same `members`.
        """
        sent = [
            Measured(
                group=one.group_id,
                index=one.index,
                log_ratio_N=one.log_ratio_N,
                logit_norm2_N=one.logit_norm2_N,
                entropy_N=one.entropy_N,
                reference_logprob_N=one.reference_logprob_N,
                score_norm=one.score_norm,
            )
            for one in mine
        ]
        found = {(one.group, one.index): one for one in self._gather(sent, Measured)}
        for member in members:
            one = found[member.group_id, member.index]
            member.log_ratio_N, member.logit_norm2_N = one.log_ratio_N, one.logit_norm2_N
            member.entropy_N, member.reference_logprob_N = one.entropy_N, one.reference_logprob_N
            member.score_norm = one.score_norm

    def _scored(self, group: TrajectoryGroup, policy_version: int) -> ScoredGroup:
        episodes = [episode.segments for episode in group.episodes]
        reward_E = torch.tensor(group.episode_rewards, dtype=torch.float64)
        advantages = calls.advantages(
            self.objective,
            Group(
                reward_E=reward_E,
                num_actions_E=torch.tensor([_num_actions(one) for one in episodes]),
                episodes=tuple(episodes),
                step=policy_version,
            ),
        )
        scale = self.objective.score_scale(reward_E)
        trajectories = [(episode, one) for episode, segments in enumerate(episodes) for one in segments]
        length_G = self.objective.lengths(
            torch.tensor([one.num_action_tokens for _, one in trajectories]),
            share_G=torch.tensor([one.weight for _, one in trajectories], dtype=torch.float64),
            num_episodes=len(episodes),
        )
        turns = [one for segments in episodes for one in turns_of(segments)] if self.objective.needs_turns else None
        members: list[list[ScoredTrajectory]] = [[] for _ in episodes]
        for index, (episode, trajectory) in enumerate(trajectories):
            member = ScoredTrajectory(
                trajectory=trajectory,
                tensors=action_tensors(trajectory, self._device),
                group_id=group.group_id,
                index=index,
                episode=episode,
                num_episodes=len(episodes),
                step=policy_version,
                score_scale=scale,
                length=float(length_G[index]),
                turns=turns[index] if turns else None,
                weights=None if trajectory.num_action_tokens else _WITHOUT_ACTIONS,
            )
            members[episode].append(member)
        if advantages is not None:
            for segments, advantage in zip(members, advantages, strict=True):
                give_advantage(segments, advantage)
        return ScoredGroup(episodes=members, reward_E=reward_E, has_advantages=advantages is not None)

    def _weigh_batch(self, members: Sequence[ScoredTrajectory], *, is_everyone: bool) -> None:
        """Weights that depend on every trajectory of the step, on all ranks: each rank computes all of them alike."""
        mine = [((member.group_id, member.index), member.member()) for member in members]
        gathered = mine if is_everyone else self._gather(mine, tuple[tuple[int, int], Member])
        everyone = sorted(gathered, key=lambda pair: pair[0])
        weights = calls.weigh(self.objective, [member for _, member in everyone])
        found = {key: one for (key, _), one in zip(everyone, weights, strict=True)}
        for member in members:
            member.weights = found[member.group_id, member.index]


def _num_actions(segments: Sequence[Trajectory]) -> int:
    return sum(segment.num_action_tokens for segment in segments)
