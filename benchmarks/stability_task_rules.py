"""The rules that the study of the quickstart's task compares: settings of the product, and two changes of the rewards.

Every rule is an `algorithm` section. Independent of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.config.algorithm import AlgorithmConfig
from benchmarks.stability_rules import RULES

SHIPPED = "opob_safe"
"""preset: vcpo_safe, whose other rules are compared with it in pairs of seeds."""
_ADDED = {
    "vcpo_published": AlgorithmConfig(preset="vcpo_published"),
    "zero_dropped": RULES["zero_dropped"].algorithm,
}
TASK_RULES = {name: rule.algorithm for name, rule in RULES.items() if rule.is_a_setting} | _ADDED
ABOUT = {name: RULES[name].about for name in TASK_RULES if name in RULES} | {
    "vcpo_published": "VCPO with the settings of its published scripts",
    "zero_dropped": "no baseline, ESS step, groups of equal rewards without gradient (as under every other rule)",
}
DEFAULT_RULES = (
    *("opob_safe", "opob_safe_leave_one_out", "vcpo_published", "opob_paper", "mean", "tis", "grpo", "gspo"),
    *("uncorrected", "opob_leave_one_out", "zero", "zero_dropped"),
)
"""The rules of the sweep, in its order."""
ON_POLICY_TWINS = {"opob": "opob_paper", "tis": "mean", "uncorrected": "mean", "gspo": "grpo"}
"""Rules that equal another one where all weights are 1: they are not run at lag 0."""

Rewards = Callable[[Sequence[float]], Sequence[float]]
"""One group's rewards of 0 and 1, to those that the learner sees."""
REWARDS: dict[str, Rewards] = {
    "0/1": lambda rewards: rewards,
    "symmetric": lambda rewards: [2 * reward - 1 for reward in rewards],
    "positive": lambda rewards: [(1 + reward) / 2 for reward in rewards],
}
"""The same task with its zero in another place: symmetric pays -1 and +1, positive 0.5 and 1."""


def seen_by_learner(rule: str, kind: str, rewards: Sequence[float]) -> Sequence[float]:
    """What the learner is given for one group's rewards of 0 and 1.

    >>> seen_by_learner("mean", "symmetric", [1.0, 0.0])
    [1.0, -1.0]
    >>> seen_by_learner("zero_dropped", "positive", [1.0, 1.0])  # no gradient, and it still counts in B
    [0.0, 0.0]
    """
    if rule == "zero_dropped" and len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return REWARDS[kind](rewards)
