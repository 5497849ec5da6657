"""Two methods for gradients with exact norms that deal out trajectories over the ranks: sharded sums, two passes.

Each rank makes records of the whole batch, computes its share of the trajectories, and is sent what the others measured
of theirs. So a group may span packs and ranks, and every rank knows every group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from agentrl.config import Config
from agentrl.types import TrajectoryGroup
from trainer import ranks
from trainer.gradient import handoff
from trainer.gradient.methods import overflow, step_members
from trainer.gradient.passes import Passes
from trainer.gradient.plain import Plain
from trainer.gradient.scored import ScoredGroup, ScoredTrajectory
from trainer.gradient.sharded_sums import ShardedSums
from trainer.gradient.step_members import ReferenceLogprobs, StepMembers
from trainer.gradient.sums import NoSums
from trainer.step_stats import GroupStats


class OnePassSharded:
    """One recorded backward per pack into two sums of which every rank holds a part: see `ShardedSums`.

    A group at a time is computed by all ranks together, since the sums of its scores become part of the gradient only
    when its baseline is known. So ranks wait for each other in every group: with fewer members than ranks some have
    nothing to do. Recorded modules only.

    Example: see `GradientMethod`.
    """

    def __init__(self, model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None) -> None:
        self._engine = engine
        self._members = step_members(model, config, reference)
        self._sums = ShardedSums(
            self._members.parameters, rank=ranks.index(), num_ranks=ranks.count(), scatter=ranks.add_up_parts
        )
        self._passes = Passes(model, self._sums)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters."""
        return self._members.parameters

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Leave this rank's parts of the gradient's sums here."""
        if is_first:
            self._sums.reset()
        scored = self._members.scored(groups, policy_version=policy_version)
        for group in scored:
            if group.trained:
                self._train(group, num_episodes)
        if is_last:
            self._sums.drop_scores()
        idle = [member for group in scored for member in group.idle]
        mine = _mine(self._members, idle)
        self._members.score_reference(mine)
        self._members.each(self._members.packed(mine), self._passes.forward_only)
        self._members.exchange(idle, mine)
        self._members.weigh_all(idle, is_everyone=True)
        return self._members.stats(scored, policy_version)

    def non_finite(self) -> list[str]:
        """Whether this rank's part overflows."""
        return overflow(self._sums.total)

    def hand_over(self) -> None:
        """Each rank gives its part of every sum, and zeros for the others'."""
        handoff.hand_over(self._engine, self._sums, factor=-float(ranks.count()))

    def discard(self) -> None:
        """The next step's sums start with zeros."""
        handoff.discard(self._engine)

    def _train(self, group: ScoredGroup, num_episodes: int) -> None:
        mine = _mine(self._members, group.trained)
        self._members.score_reference(mine)

        def make_pass(pack: list[ScoredTrajectory]) -> None:
            self._passes.with_norms(pack, self._members.weigh_as_one, num_episodes=num_episodes)

        self._members.each(self._members.packed(mine), make_pass, is_joint=True)
        self._members.exchange(group.trained, mine)
        self._members.weigh_all(group.trained, is_everyone=True)
        self._sums.close_group(float(group.move_baseline(self._members.objective)[0]))


class TwoPass(Plain):
    """A recorded backward per pack for the norms, which keeps nothing, then the plain method's passes.

    Everything is known before the gradient is made: packs hold trajectories of any groups, and a baseline may differ
    from episode to episode of a group. The first pass needs recorded modules.

    Example: see `GradientMethod`.
    """

    def __init__(self, model: Any, engine: Any, config: Config, reference: ReferenceLogprobs | None = None) -> None:
        super().__init__(model, engine, config, reference)
        first = Passes(model, NoSums(self.parameters))
        self._measure = first.exact_norms if config.algorithm.baseline_norms == "exact" else first.proxy_norms

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Leave the gradient in DeepSpeed."""
        members = self._members
        scored = members.scored(groups, policy_version=policy_version)
        trained = [member for group in scored for member in group.trained]
        idle = [member for group in scored for member in group.idle]
        mine, mine_idle = _mine(members, trained), _mine(members, idle)
        members.score_reference([*mine, *mine_idle])
        packs = members.packed(mine)
        members.each(packs, self._measure)
        members.each(members.packed(mine_idle), self._passes.forward_only)
        members.exchange([*trained, *idle], [*mine, *mine_idle])
        members.weigh_all([*trained, *idle], is_everyone=True)
        for group in scored:
            if group.trained:
                group.move_baseline(members.objective)
        # Before the second pass, which scores again: every rank has the same statistics, from the same bytes.
        stats = members.stats(scored, policy_version)
        self._passes.differentiate(members.evenly(packs), members.weigh, num_episodes=num_episodes, is_last=is_last)
        return stats


def _mine(members: StepMembers, every: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    return members.spread(every, rank=ranks.data_index(), num_ranks=ranks.data_count())
