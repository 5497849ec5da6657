"""The rules that the stability study compares, as settings of the project's own objective.

Where a rule is not in the project (the published code's way, b* without w^2) its b* is here, over
trainer/objective/vcpo.py. Independent of runs.
Shapes: _G members of one group. float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from trainer.objective import vcpo

Optimum = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]
"""(log weight in use, log weight untruncated, score norm, reward), all [G], to b*, one number or one a member [G].

None: no member has a gradient.
"""
ALPHA = 0.125
"""Of `scaled_mean`: fixed before the sweep, so that it pushes down as much as `opob_safe` (stability_rewards.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the study's tables."""

    algorithm: AlgorithmConfig
    about: str
    optimum: Optimum | None = None
    """b*, for rules that need norms."""
    has_proxy_norms: bool = False
    """Norms of the normalisation scales' gradients in the place of whole norms."""
    drops_equal: bool = False
    """Groups of equal rewards have no part, whatever the baseline: what a run does by default."""

    @property
    def is_a_setting(self) -> bool:
        """Whether a run's config can say it: `algorithm` is all there is to it."""
        ways = (None, in_use, as_written, safe, of_others, safe_of_others)
        return self.optimum in ways and not self.has_proxy_norms and not self.drops_equal


def in_use(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* of arXiv 2602.17616, section 4.2, with the weights in use."""
    return vcpo.optimal_baseline(log_used_G, norm_G, reward_G)


def as_written(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """The same with w itself, as the paper writes it; the gradient has min(w, c)."""
    return vcpo.optimal_baseline(log_weight_G, norm_G, reward_G)


def safe(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min(b*, mean R)."""
    return vcpo.safe_baseline(log_used_G, norm_G, reward_G)


def of_others(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* of the other members. [G]"""
    return vcpo.leave_one_out_baseline(log_used_G, norm_G, reward_G)


def safe_of_others(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min(b*, mean) of the other members. [G]"""
    return vcpo.safe_leave_one_out_baseline(log_used_G, norm_G, reward_G)


def scaled_mean(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """min R + ALPHA (mean R - min R): below the mean whatever b* is. ALPHA mean R where the lowest reward is 0."""
    return reward_G.min() + ALPHA * (reward_G.mean() - reward_G.min())


def published_code(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """Weights squared twice: truncated ones, which the measured norms already carry, and untruncated ones."""
    return vcpo.optimal_baseline(log_used_G + log_weight_G, norm_G, reward_G)


def without_weights(log_used_G: Tensor, log_weight_G: Tensor, norm_G: Tensor, reward_G: Tensor) -> Tensor | None:
    """b* from the norms alone, as if every weight were 1."""
    return vcpo.optimal_baseline(torch.zeros_like(log_used_G), norm_G, reward_G)


_OPOB = AlgorithmConfig(baseline="opob", rho_base=1.0)
_BAPO = AlgorithmConfig(
    preset="bapo",
    adaptive_low=(0.6, 0.9),
    adaptive_high=(1.2, 3.0),
    adaptive_step=(0.05, 0.05),
    positive_share=0.5,
    dual_clip=None,
)

RULES: dict[str, Rule] = {
    "opob": Rule(algorithm=_OPOB, optimum=in_use, about="VCPO, b* from the weights in use"),
    "opob_paper": Rule(
        algorithm=AlgorithmConfig(preset="vcpo", rho_base=1.0),
        optimum=as_written,
        about="VCPO as the paper writes it: w in b*, min(w, c) in the gradient",
    ),
    "opob_code": Rule(algorithm=_OPOB, optimum=published_code, about="VCPO as its code has it: w squared twice"),
    "opob_safe": Rule(
        algorithm=AlgorithmConfig(baseline="opob_safe", rho_base=1.0), optimum=safe, about="min(b*, mean)"
    ),
    "opob_leave_one_out": Rule(
        algorithm=AlgorithmConfig(baseline="opob_leave_one_out", rho_base=1.0),
        optimum=of_others,
        about="b* of the other episodes",
    ),
    "opob_safe_leave_one_out": Rule(
        algorithm=AlgorithmConfig(baseline="opob_safe_leave_one_out", rho_base=1.0),
        optimum=safe_of_others,
        about="min(b*, mean) of the other episodes",
    ),
    "scaled_mean": Rule(
        algorithm=_OPOB,
        optimum=scaled_mean,
        about="part of the mean, ESS step: the control for a baseline that is merely low",
    ),
    "opob_no_w2": Rule(algorithm=_OPOB, optimum=without_weights, about="b* from norms alone"),
    "opob_proxy": Rule(
        algorithm=_OPOB, optimum=in_use, has_proxy_norms=True, about="b* with the norms of normalisation scales"
    ),
    "zero": Rule(algorithm=AlgorithmConfig(baseline="none", rho_base=1.0), about="no baseline, ESS step"),
    "zero_dropped": Rule(
        algorithm=AlgorithmConfig(baseline="none", rho_base=1.0),
        drops_equal=True,
        about="no baseline, ESS step, without the groups of equal rewards",
    ),
    "mean": Rule(algorithm=AlgorithmConfig(baseline="mean", rho_base=1.0), about="mean baseline, ESS step"),
    "leave_one_out": Rule(
        algorithm=AlgorithmConfig(baseline="leave_one_out", rho_base=1.0), about="mean of the others, ESS step"
    ),
    "tis": Rule(algorithm=AlgorithmConfig(preset="tis"), about="sequence-TIS, mean baseline"),
    "uncorrected": Rule(
        algorithm=AlgorithmConfig(preset="tis", ratio="none", treatment="none"), about="no correction, mean baseline"
    ),
    "grpo": Rule(algorithm=AlgorithmConfig(preset="grpo"), about="PPO clip 0.2, token"),
    "gspo": Rule(
        algorithm=AlgorithmConfig(preset="gspo", clip_low=0.05, clip_high=0.05),
        about="geometric mean, clip 0.05: the published 3e-4 is made for thousands of tokens",
    ),
    "m2po": Rule(
        algorithm=AlgorithmConfig(preset="m2po", treatment="second_moment_mask"), about="second moment 0.04, masked"
    ),
    "bapo": Rule(algorithm=_BAPO, about="adaptive clip with the ranges of its README, no dual clip"),
}
