"""A step's policy gradient by sums: which packs go through which passes, and what each group contributes.

    g = 1/B sum_i c_i A_i / L_i sum_t w_it grad log pi(a_it)    (objective/interface.py defines A, L, w and more)

B episodes, each of one or several trajectories i with shares c_i (`Trajectory.weight`).

There are three ways, depending on what weights and baseline must know first:
- one pass: a pack's own log-probabilities suffice, its backward follows its forward.
- one pass with norms (baseline opob): packs hold one group; once its norms are measured its baseline is moved, by means
  of the score sum that the same backward left beside the gradient:  g -= (b* - b_0) sum_i w_i/(s B) score_i.
- two passes: everything is scored first, with norms where these are by proxy, each episode has its own baseline or
  ranks divide packs; then weights and baselines are computed; then every pack is differentiated.

Independent of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.types import TrajectoryGroup
from trainer import ranks
from trainer.gradient.passes import Passes
from trainer.gradient.scored import ScoredGroup, ScoredTrajectory
from trainer.gradient.step_members import Gather, ReferenceLogprobs, StepMembers
from trainer.gradient.sums import GradientSums
from trainer.step_stats import GroupStats

DEFAULT_PACK_TOKENS = 8192


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
        annotates: whether the numbers of each token of a step are wanted.
        reference: scores packs under the frozen model, for objectives that need it.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        *,
        pack_tokens: int = DEFAULT_PACK_TOKENS,
        gather: Gather = lambda records, kind: records,
        annotates: Callable[[int], bool] = lambda step: False,
        reference: ReferenceLogprobs | None = None,
    ) -> None:
        self._members = StepMembers(
            model, algorithm, pack_tokens=pack_tokens, gather=gather, annotates=annotates, reference=reference
        )
        self._objective = self._members.objective
        self._needs_norms = self._objective.needs_norms
        self._is_exact = algorithm.baseline_norms == "exact"
        # Where ranks divide each pack, its norms are measured over blocks of the weights, of which no sums are kept.
        moves_baseline = not self._objective.needs_norms_first and ranks.sequence_count() == 1
        self._has_scores = self._needs_norms and self._is_exact and moves_baseline
        self.parameters = self._members.parameters
        """The trained parameters, in the order of `sums.total`."""
        self.sums = GradientSums(self.parameters, has_scores=self._has_scores)
        self._passes = Passes(model, self.sums)

    def estimate(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        policy_version: int,
        num_episodes: int,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[GroupStats]:
        """Leave these groups' share of g in `sums`, with B = `num_episodes`. One record per group, in their order.

        A group without reward spread (or with one member) has no gradient under a baseline or a standard deviation;
        its members are still scored, since their weights count in rho. NaN and infinities raise nothing: see
        `TrajectoryStats.non_finite`, by which the step must be refused. `is_first`, `is_last`: see
        `methods.GradientMethod`.
        """
        if is_first:
            self.sums.reset()
        scored = self._members.scored(groups, policy_version=policy_version)
        self._members.score_reference([member for group in scored for member in group.members])
        active = [group for group in scored if group.has_advantages]
        idle = [member for group in scored for member in group.idle]
        if self._has_scores:
            self._one_pass_with_norms(active, num_episodes)
            if is_last:
                self.sums.drop_scores()
            self._idle_pass(idle)
        elif self._objective.needs_batch or self._needs_norms:
            self._two_passes(active, idle, num_episodes)
        else:
            self._plain_pass(active, num_episodes)
            self._idle_pass(idle)
        return self._members.stats(scored, policy_version)

    def _idle_pass(self, idle: Sequence[ScoredTrajectory]) -> None:
        self._members.each(self._members.packed(idle), self._passes.forward_only)
        for member in idle:
            self._members.weigh(member)

    def _plain_pass(self, active: Sequence[ScoredGroup], num_episodes: int) -> None:
        trained = [member for group in active for member in group.trained]
        self._members.each(
            self._members.packed(trained),
            lambda pack: self._passes.plain(pack, self._members.weigh, num_episodes=num_episodes),
        )

    def _one_pass_with_norms(self, active: Sequence[ScoredGroup], num_episodes: int) -> None:
        packs = [(pack, group) for group in active for pack in self._members.packed(group.trained)]
        group_of = {id(pack): group for pack, group in packs}
        last_pack_of = {id(group): id(pack) for pack, group in packs}

        def make_pass(pack: list[ScoredTrajectory]) -> None:
            self._passes.with_norms(pack, self._members.weigh_as_one, num_episodes=num_episodes)
            if pack and last_pack_of[id(group := group_of[id(pack)])] == id(pack):
                self.sums.close_group(float(group.move_baseline(self._objective)[0]))

        self._members.each([pack for pack, _ in packs], make_pass)

    def _two_passes(self, active: Sequence[ScoredGroup], idle: Sequence[ScoredTrajectory], num_episodes: int) -> None:
        trained = [member for group in active for member in group.trained]
        measure = self._passes.exact_norms if self._is_exact else self._passes.proxy_norms
        first_pass = measure if self._needs_norms else self._passes.forward_only
        self._members.each(self._members.packed(trained), first_pass)
        self._members.each(self._members.packed(idle), self._passes.forward_only)
        self._members.weigh_all([*trained, *idle])
        if self._needs_norms:
            for group in active:
                group.move_baseline(self._objective)
        self._plain_pass(active, num_episodes)
