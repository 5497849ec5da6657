"""The policy-gradient objective: from log-ratios and rewards to the weight of every score. Pure.

    g = 1/B sum_i A_i / L_i sum_t w_it grad log pi(a_it)

B trajectories, A advantage, L length or 1, w the treated importance weight of token t. The settings choose each of
them; docs/algorithms.md lists the published algorithms that result. Independent of models, packing and DeepSpeed, and
of how score norms are measured: where the baseline needs norms, `baseline` is called once they are known.
Shapes: _G members of one group, _N action tokens of one trajectory, _M action tokens of a batch. float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import OPTIMAL, PER_EPISODE, PER_TOKEN
from agentrl.report.statistics import has_spread
from trainer.objective import baselines, ratios, reference_kl, silencing, vcpo
from trainer.objective.interface import Group, Member, MemberWeights, Objective, Terms, by_group


class PolicyGradient(Objective):
    """The objective that the settings of the config describe: every preset is an instance of it.

    >>> objective = PolicyGradient(AlgorithmConfig(preset="tis"))
    >>> objective.advantages(Group(reward_E=torch.tensor([1.0, 0.0]), num_actions_E=torch.tensor([5, 5]))).tolist()
    [0.5, -0.5]
    >>> member = Member(log_ratio_N=torch.tensor([3.0, 1.0]), advantage=0.5, reward=1.0, group=0)
    >>> weights = objective.weights(member)
    >>> weights.log_weight, weights.num_clipped  # e^4 is truncated at 8
    (4.0, 1)
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        super().__init__(algorithm)
        self._bounds = ratios.Bounds(low=1 - algorithm.clip_low, high=1 + algorithm.clip_high)
        self.needs_norms = algorithm.baseline in OPTIMAL
        self.has_own_baselines = algorithm.baseline in PER_EPISODE
        self.needs_logits = algorithm.baseline == "otb"
        self.needs_reference = type(self).needs_reference or algorithm.has_penalty
        self.has_terms = type(self).has_terms or algorithm.has_terms
        self._penalizes_rewards = algorithm.has_penalty and algorithm.kl == "reward"
        self.needs_batch = type(self).needs_batch or algorithm.looks_at_batch

    def advantages(self, group: Group) -> Tensor | list[Tensor] | None:
        """(R - b_0) / s, with b_0 the reference baseline. [E] None: the group has no gradient.

        b_0 is the baseline itself where rewards and lengths determine it, and the mean where norms are needed (the
        caller then moves it to `baseline`). For otb R - b_t is part of the weights, and the advantage is 1/s.
        """
        reward_E = group.reward_E.double()
        if self.algorithm.needs_spread and not has_spread(reward_E.tolist()):
            return torch.zeros_like(reward_E) if self.has_terms else None
        if self.needs_logits:
            return torch.full_like(reward_E, self.score_scale(reward_E))
        return self._centered(reward_E, group.num_actions_E) * self.score_scale(reward_E)

    def _centered(self, value_E: Tensor, num_actions_E: Tensor) -> Tensor:
        """The values minus b_0. [E]"""
        match self.algorithm.baseline:
            case "none":
                return value_E
            case "leave_one_out":
                return value_E - baselines.leave_one_out(value_E)
            case "length_weighted":
                return value_E - baselines.length_weighted(value_E, num_actions_E)
            case _:
                return value_E - baselines.mean(value_E)

    def terms(self, member: Member) -> Terms | None:
        """The entropy term, and the penalty on leaving the frozen model where it is a term of the loss."""
        coef, seed_N = self.algorithm.entropy_coef, None
        if self.algorithm.has_penalty and not self._penalizes_rewards:
            seed = reference_kl.k2_seed if self.algorithm.kl == "k2" else reference_kl.k3_seed
            seed_N = reference_kl.coefficient(self.algorithm, member.step) * seed(reference_kl.log_ratio_N(member))
        return Terms(logprob_seed_N=seed_N, entropy_seed_N=torch.full_like(member.log_ratio_N, coef) if coef else None)

    def score_scale(self, reward_E: Tensor) -> float:
        """1/s, which multiplies a trajectory's weight in the score sum. 1.0 for a group without spread."""
        if not self.algorithm.normalize_by_std or not has_spread(reward_E.tolist()):
            return 1.0
        return 1 / float(baselines.reward_std(reward_E.double(), self.algorithm.normalize_by_std))

    def log_in_baseline(self, weights: MemberWeights) -> float:
        """log of one trajectory's weight in b*; -inf where the trajectory has no part in the gradient."""
        if self.algorithm.baseline_weights == "treated" or weights.log_used == -math.inf:
            return weights.log_used
        if self.algorithm.baseline_weights == "product":
            return weights.log_used + weights.log_weight
        return weights.log_weight

    def norm_in_baseline(self, score_norm: float, length: float) -> float:
        """One trajectory's norm in b*, from that of its score divided by `length`."""
        return score_norm * length if self.algorithm.norm_of == "sum" else score_norm

    def baseline(self, log_weight_E: Tensor, score_norm_E: Tensor, reward_E: Tensor) -> Tensor | None:
        """b* of the opob baselines from `log_in_baseline` and the score norms. A scalar; [E] for leave-one-out.

        None when no member has a gradient. Raises ValueError under any other baseline.
        """
        match self.algorithm.baseline:
            case "opob":
                return vcpo.optimal_baseline(log_weight_E, score_norm_E, reward_E)
            case "opob_safe":
                return vcpo.safe_baseline(log_weight_E, score_norm_E, reward_E)
            case "opob_leave_one_out":
                return vcpo.leave_one_out_baseline(log_weight_E, score_norm_E, reward_E)
            case "opob_safe_leave_one_out":
                return vcpo.safe_leave_one_out_baseline(log_weight_E, score_norm_E, reward_E)
            case other:
                raise ValueError(f"baseline {other} does not depend on norms")

    def weights(self, member: Member) -> MemberWeights:
        """The weights of one trajectory by itself. Raises ValueError where they depend on the batch (`needs_batch`)."""
        if self.needs_batch:
            raise ValueError(f"{self.algorithm.treatment}, {self.algorithm.baseline}: call batch_weights")
        log_weight_N = ratios.log_weights(member.log_ratio_N.double(), self.algorithm.ratio)
        found = self._member(member, log_weight_N, self._treated(member, log_weight_N))
        return silencing.silenced([member], [found], self.algorithm)[0]

    def batch_weights(self, members: Sequence[Member]) -> list[MemberWeights]:
        """The weights of all trajectories of the step, in the members' order. Their groups must be complete."""
        if not members:  # no trajectory of the step has an action token
            return []
        given = members
        if self._penalizes_rewards:
            beta = reference_kl.coefficient(self.algorithm, members[0].step)
            members = reference_kl.with_penalty(members, beta, self._centered)
        log_weights = [ratios.log_weights(one.log_ratio_N.double(), self.algorithm.ratio) for one in members]
        treated = self._treated_together(members, log_weights)
        found = [
            self._member(member, log_weight_N, log_used_N)
            for member, log_weight_N, log_used_N in zip(members, log_weights, treated, strict=True)
        ]
        found = silencing.silenced(members, found, self.algorithm)
        if self._penalizes_rewards:
            return [_moved(*each) for each in zip(given, members, found, strict=True)]
        return self._times_token_advantage(members, found) if self.needs_logits else found

    def _treated_together(self, members: Sequence[Member], log_weights: Sequence[Tensor]) -> list[Tensor]:
        """Every member's log weights after a treatment that may depend on all of them."""
        algorithm = self.algorithm
        log_ratio_M = torch.cat([member.log_ratio_N.double() for member in members])
        advantage_M = torch.cat([member.token_advantage_N for member in members])
        match algorithm.treatment:
            case "second_moment" | "second_moment_mask" as kind:
                rule = ratios.second_moment_clip if kind == "second_moment" else ratios.second_moment_mask
                keep_M = rule(log_ratio_M, advantage_M, algorithm.second_moment_bound)
                keeps = torch.split(keep_M, [len(member.log_ratio_N) for member in members])
                return [w_N.masked_fill(~keep_N, -math.inf) for w_N, keep_N in zip(log_weights, keeps, strict=True)]
            case "adaptive_clip":
                bounds = ratios.adaptive_bounds(
                    log_ratio_M,
                    advantage_M,
                    low=algorithm.adaptive_low,
                    high=algorithm.adaptive_high,
                    step=algorithm.adaptive_step,
                    positive_share=algorithm.positive_share,
                )
                return [
                    ratios.clipped_objective(
                        log_weight_N, member.token_advantage_N, bounds, dual_clip=algorithm.dual_clip
                    )
                    for member, log_weight_N in zip(members, log_weights, strict=True)
                ]
            case _:
                return [self._treated(member, w_N) for member, w_N in zip(members, log_weights, strict=True)]

    def _treated(self, member: Member, log_weight_N: Tensor) -> Tensor:
        algorithm = self.algorithm
        match algorithm.treatment:
            case "truncate":
                return ratios.truncated(log_weight_N, algorithm.max_weight)
            case "mask":
                return ratios.masked(log_weight_N, low=algorithm.min_weight, high=algorithm.max_weight)
            case "clip":
                return ratios.clipped_objective(
                    log_weight_N, member.token_advantage_N, self._bounds, dual_clip=algorithm.dual_clip
                )
            case "clip_weight":
                return ratios.clipped_weight(log_weight_N, self._bounds)
            case "none" if algorithm.ratio == "suffix":
                return ratios.vtrace(member.log_ratio_N.double(), rho=algorithm.vtrace_rho, c=algorithm.vtrace_c)
            case "none" | "second_moment" | "second_moment_mask" | "adaptive_clip":  # _treated_together: the last three
                return log_weight_N
            case _:
                assert_never(algorithm.treatment)

    def _member(self, member: Member, log_weight_N: Tensor, log_used_N: Tensor) -> MemberWeights:
        if self.algorithm.ratio not in PER_TOKEN:  # one weight, repeated at every token
            log_weight_N, log_first_N = log_weight_N[:1], log_used_N[:1]
        else:
            log_first_N = log_used_N
        num_clipped = int((log_first_N != log_weight_N).sum())
        if self.algorithm.ratio == "suffix":  # ratios: one that is cut changes the weights of all tokens before it
            num_clipped = ratios.num_cut(member.log_ratio_N, rho=self.algorithm.vtrace_rho, c=self.algorithm.vtrace_c)
        return MemberWeights(
            weight_N=ratios.exp(log_used_N),
            log_weight=float(member.log_ratio_N.double().sum()),
            log_used=float(log_first_N.logsumexp(0) - math.log(len(log_first_N))) if len(log_first_N) else 0.0,
            num_clipped=num_clipped,
            num_weights=len(log_first_N),
        )

    def _times_token_advantage(self, members: Sequence[Member], found: Sequence[MemberWeights]) -> list[MemberWeights]:
        """The same weights times R - b_t, group by group."""
        weighted = list(found)
        for index_G in by_group(members):
            reward_G = torch.tensor([members[i].reward for i in index_G], dtype=torch.float64)
            norm2_G = [_required(members[i].logit_norm2_N) for i in index_G]
            baseline_G = baselines.optimal_token(reward_G, [found[i].weight_N for i in index_G], norm2_G)
            for i, reward, baseline_N in zip(index_G, reward_G, baseline_G, strict=True):
                weighted[i] = replace(found[i], weight_N=found[i].weight_N * (reward - baseline_N))
        return weighted


def _moved(given: Member, penalized: Member, found: MemberWeights) -> MemberWeights:
    """The seeds that turn the weight's advantage into the penalized one."""
    return replace(found, logprob_seed_N=found.weight_N * (penalized.advantage - given.advantage))


def _required(logit_norm2_N: Tensor | None) -> Tensor:
    if logit_norm2_N is None:
        raise ValueError("the optimal token baseline needs Member.logit_norm2_N")
    return logit_norm2_N.double()
