"""The loss, as pure functions: importance ratios, baselines, VCPO, the weight of every score in the policy gradient.

Exports what an objective of your own is written with (docs/write-an-objective.md).

May import: `agentrl.config`, `agentrl.env`, `agentrl.errors`, `agentrl.report.statistics`, `agentrl.types`.
Start reading in `interface.py`, then `policy_gradient.py`.
"""

from trainer.objective.interface import Group, Member, MemberWeights, Objective, Terms, by_group
from trainer.objective.policy_gradient import PolicyGradient
from trainer.objective.registry import make_objective
from trainer.objective.surrogate import Sample, surrogate

__all__ = [
    "Group",
    "Member",
    "MemberWeights",
    "Objective",
    "PolicyGradient",
    "Sample",
    "Terms",
    "by_group",
    "make_objective",
    "surrogate",
]
