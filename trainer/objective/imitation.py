"""Objectives that learn from a teacher or from successes, and not from advantages. Pure.

`distillation`: on-policy distillation (GKD, arXiv 2306.13649, at student data only and reverse KL). The policy writes,
the teacher (`model.reference`) scores what was written:

    g = 1/B sum_i 1/L_i sum_t w_it (log teacher(a_it) - log pi(a_it)) grad log pi(a_it)

On-policy its expectation is the negative gradient of KL(pi, teacher) at every visited state. Rewards count for nothing
but the metrics.

`imitation`: supervised steps on the episodes whose reward exceeds a bound (rejection sampling, RAFT arXiv 2304.06767):

    g = 1/B sum_{i: R_i > bound} 1/L_i sum_t grad log pi(a_it)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trainer.objective import reference_kl
from trainer.objective.interface import Group, Member, MemberWeights
from trainer.objective.policy_gradient import PolicyGradient


class Distillation(PolicyGradient):
    """Per-token advantages log teacher - log pi, with the section's ratio and treatment.

    Example: `make_objective(AlgorithmConfig(preset="distill")).needs_reference` is True.
    """

    needs_reference = True

    def advantages(self, group: Group) -> Tensor:
        """0 for each episode: all of the gradient is in the terms."""
        return torch.zeros_like(group.reward_E, dtype=torch.float64)

    def weights(self, member: Member) -> MemberWeights:
        """The treated importance weights, and w (log teacher - log pi) as seeds."""
        found = super().weights(member)
        return replace(found, logprob_seed_N=found.weight_N * reference_kl.log_ratio_N(member))


class Imitation(PolicyGradient):
    """Log-likelihood of the episodes whose reward exceeds `imitate_above`.

    >>> from agentrl.config.algorithm import AlgorithmConfig
    >>> group = Group(reward_E=torch.tensor([1.0, 0.0]), num_actions_E=torch.tensor([5, 7]))
    >>> Imitation(AlgorithmConfig(preset="imitate")).advantages(group).tolist()
    [1.0, 0.0]
    """

    def advantages(self, group: Group) -> Tensor:
        """1 above the bound, else 0. [E] NaN stays NaN and refuses the step."""
        reward_E = group.reward_E.double()
        return torch.where(reward_E.isnan(), reward_E, (reward_E > self.algorithm.imitate_above).double())
