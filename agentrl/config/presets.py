"""Published policy-gradient algorithms as one line of settings each, and the combinations that make no sense.

Names, one line on each, and numbers. Independent of tensors: trainer/objective/policy_gradient.py carries the settings
out. docs/algorithms.md has the equations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from agentrl.config.section import Choices

Preset = Annotated[
    Literal[
        "vcpo_safe",
        "vcpo",
        "vcpo_published",
        "grpo",
        "dapo",
        "gspo",
        "tis",
        "mis",
        "cispo",
        "rloo",
        "opo",
        "otb",
        "m2po",
        "bapo",
        "vtrace",
        "reinforce",
        "tba",
        "distill",
        "imitate",
    ],
    Choices(
        {
            "vcpo_safe": "as vcpo, with a baseline that never exceeds the group's mean",
            "vcpo": "VCPO's formulas: truncated sequence weights, optimal baseline, ESS-scaled step (arXiv 2602.17616)",
            "vcpo_published": "as vcpo, with the settings of its four published scripts",
            "grpo": "token ratios, PPO's clip, advantages divided by their deviation; for its KL: kl_beta",
            "dapo": "GRPO with a higher upper clip, every token of a group weighted alike (arXiv 2503.14476)",
            "gspo": "geometric-mean ratios with tight clips (arXiv 2507.18071)",
            "tis": "truncated importance sampling with the group's mean as baseline",
            "mis": "masked importance sampling with the group's mean as baseline",
            "cispo": "token weights clipped, every gradient kept (MiniMax-M1, arXiv 2506.13585)",
            "rloo": "on-policy, leave-one-out baseline (arXiv 2402.14740)",
            "opo": "on-policy, length-weighted baseline (arXiv 2505.23585)",
            "otb": "on-policy, optimal baseline for each token (arXiv 2602.07078)",
            "m2po": "a clip that moves until the ratios' second moment is small (arXiv 2510.01161)",
            "bapo": "clip bounds that move until positive advantages have their share (arXiv 2510.18927)",
            "vtrace": "each token weighted by its own and all later ratios, each cut at 1 (IMPALA, arXiv 1802.01561)",
            "reinforce": "on-policy, no baseline (Williams 1992)",
            "tba": "trajectory balance: log(policy / reference) in the reward, no ratio (arXiv 2503.18929)",
            "distill": "on-policy distillation: learns from a teacher's scores, not from rewards (arXiv 2306.13649)",
            "imitate": "supervised: the likelihood of episodes with rewards above imitate_above (arXiv 2304.06767)",
        }
    ),
]
Ratio = Annotated[
    Literal["none", "token", "suffix", "sequence", "geometric_mean"],
    Choices(
        {
            "none": "no correction: 1",
            "token": "each token's own ratio",
            "suffix": "each token's own ratio times those of all later tokens, each cut (V-trace)",
            "sequence": "one for the episode: exp of the sum of its log ratios",
            "geometric_mean": "one for the episode: exp of the mean of its log ratios",
        }
    ),
]
Treatment = Annotated[
    Literal["none", "truncate", "mask", "clip", "clip_weight", "second_moment", "second_moment_mask", "adaptive_clip"],
    Choices(
        {
            "none": "used as they are",
            "truncate": "min(w, max_weight) (TIS)",
            "mask": "0 outside [min_weight, max_weight] (MIS)",
            "clip": "0 where PPO's clipped objective is flat: bounds 1 - clip_low, 1 + clip_high",
            "clip_weight": "clamped to [1 - clip_low, 1 + clip_high], the gradient kept (CISPO)",
            "second_moment": "0 where |log ratio| is above a cap: its capped mean square is second_moment_bound (M2PO)",
            "second_moment_mask": "0 for the largest ratios, until the mean square of the others' log is within it",
            "adaptive_clip": "PPO's clip, with bounds that move within adaptive_low and adaptive_high (BAPO)",
        }
    ),
]
Baseline = Annotated[
    Literal[
        "none",
        "mean",
        "leave_one_out",
        "opob",
        "opob_safe",
        "opob_leave_one_out",
        "opob_safe_leave_one_out",
        "length_weighted",
        "otb",
    ],
    Choices(
        {
            "none": "0",
            "mean": "the group's mean reward",
            "leave_one_out": "the mean reward of the others (RLOO)",
            "opob": "VCPO's optimal baseline: rewards weighted by w^2 times the squared gradient norm",
            "opob_safe": "the same, but never above the group's mean",
            "opob_leave_one_out": "opob, of the other episodes only; needs learner.gradient: two_pass",
            "opob_safe_leave_one_out": "opob_safe, of the other episodes only; needs learner.gradient: two_pass",
            "length_weighted": "rewards weighted by length (OPO)",
            "otb": "the optimal baseline of each token",
        }
    ),
]
StepScale = Annotated[
    Literal["none", "ess_sqrt", "ess_linear"],
    Choices(
        {
            "none": "1",
            "ess_sqrt": "(rho / rho_base)^(1/2), for AdamW",
            "ess_linear": "rho / rho_base, for SGD",
        }
    ),
]
LengthNorm = bool | Literal["group"]
StdNorm = bool | Literal["population"]

PER_TOKEN: frozenset[str] = frozenset({"token", "suffix"})
"""Ratios that differ among the tokens of a trajectory."""

PER_EPISODE: frozenset[str] = frozenset({"opob_leave_one_out", "opob_safe_leave_one_out"})
"""Baselines of one group that differ from episode to episode: norms must be known before the gradient is made."""
OPTIMAL: frozenset[str] = PER_EPISODE | {"opob", "opob_safe"}
"""Baselines that need the norm of each episode's score."""
WHOLE_BATCH: frozenset[str] = frozenset({"second_moment", "second_moment_mask", "adaptive_clip"})
"""Treatments that look at all tokens of the step and at the signs of their advantages."""

READ_BY: Mapping[str, tuple[Treatment, ...]] = {
    "max_weight": ("truncate", "mask"),
    "min_weight": ("mask",),
    "clip_low": ("clip", "clip_weight"),
    "clip_high": ("clip", "clip_weight"),
    "dual_clip": ("clip", "adaptive_clip"),
    "second_moment_bound": ("second_moment", "second_moment_mask"),
    "adaptive_low": ("adaptive_clip",),
    "adaptive_high": ("adaptive_clip",),
    "adaptive_step": ("adaptive_clip",),
    "positive_share": ("adaptive_clip",),
}
"""Setting -> the treatments that read it. Every treatment reads the settings that are not listed."""

_DEEPSEEK = {"baseline": "mean", "normalize_by_std": True, "step_scale": "none"}
_PLAIN = {"ratio": "none", "treatment": "none", "normalize_by_length": False, "step_scale": "none"}

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "vcpo_safe": {},  # the defaults of AlgorithmConfig
    "vcpo": {"baseline": "opob", "baseline_weights": "untreated"},
    "vcpo_published": {
        "baseline": "opob",
        "baseline_weights": "untreated",
        "norm_of": "sum",
        "normalize_by_std": "population",
        "rho_base": 1.0,
        "keep_equal_rewards": True,
    },
    "grpo": {**_DEEPSEEK, "ratio": "token", "treatment": "clip", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {**_DEEPSEEK, "ratio": "token", "treatment": "clip", "clip_high": 0.28, "normalize_by_length": "group"},
    "gspo": {**_DEEPSEEK, "ratio": "geometric_mean", "treatment": "clip", "clip_low": 3e-4, "clip_high": 4e-4},
    "tis": {"treatment": "truncate", "baseline": "mean", "step_scale": "none"},
    "mis": {"treatment": "mask", "baseline": "mean", "step_scale": "none"},
    "cispo": {
        **_DEEPSEEK,
        "ratio": "token",
        "treatment": "clip_weight",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "normalize_by_length": "group",
    },
    "rloo": {**_PLAIN, "baseline": "leave_one_out"},
    "opo": {**_PLAIN, "baseline": "length_weighted"},
    "otb": {**_PLAIN, "baseline": "otb"},
    "m2po": {**_DEEPSEEK, "ratio": "token", "treatment": "second_moment", "normalize_by_length": "group"},
    "bapo": {
        **_DEEPSEEK,
        "ratio": "token",
        "treatment": "adaptive_clip",
        "adaptive_low": (0.8, 0.95),
        "adaptive_high": (1.2, 2.0),
        "adaptive_step": (0.05, 0.1),
        "positive_share": 1 / 3,
        "dual_clip": 3.0,
        "normalize_by_length": "group",
    },
    "vtrace": {"ratio": "suffix", "treatment": "none", "baseline": "leave_one_out", "step_scale": "none"},
    "reinforce": {**_PLAIN, "baseline": "none"},
    "tba": {**_PLAIN, "baseline": "mean", "kl": "reward", "kl_beta": 0.012, "kl_beta_end": 0.004},
    "distill": {
        "objective": "distillation",
        "ratio": "token",
        "treatment": "truncate",
        "baseline": "none",
        "step_scale": "none",
        "normalize_by_length": "group",
    },
    "imitate": {**_PLAIN, "objective": "imitation", "baseline": "none", "normalize_by_length": True},
}


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the preset, overridden by those in `given`. The type refuses an unknown preset later."""
    preset = given.get("preset", "vcpo_safe")
    line = PRESETS.get(preset, {}) if isinstance(preset, str) else {}  # type: ignore[call-overload]
    return {**line, **given}


def unread(treatment: Treatment, changed: Collection[str]) -> str | None:
    """Why one of `changed` (the settings that differ from their preset) has no effect, and how to fix it; else None."""
    for name, treatments in READ_BY.items():
        if name in changed and treatment not in treatments:
            fix = f"leave it out, or set treatment: {' or '.join(treatments)}"
            return f"{name} does nothing under treatment={treatment}; {fix}"
    return None


def refusal(*, ratio: Ratio, treatment: Treatment, baseline: Baseline) -> str | None:
    """Why a combination makes no sense, and how to fix it; None where it makes sense."""
    if ratio == "suffix" and treatment != "none":
        return f"ratio=suffix cuts its ratios itself, by vtrace_rho and vtrace_c; set treatment: none, not {treatment}"
    if ratio == "none" and treatment != "none":
        return f"treatment={treatment} has no weights to treat under ratio=none; set treatment: none, or another ratio"
    if treatment in WHOLE_BATCH and ratio != "token":
        return f"treatment={treatment} is defined over the tokens of the batch; set ratio: token"
    if baseline in OPTIMAL and ratio in PER_TOKEN:
        return (
            f"baseline={baseline} needs one weight for each trajectory, ratio={ratio} has one for each token; "
            "set ratio: sequence or geometric_mean, or baseline: mean or otb"
        )
    if baseline in OPTIMAL | {"otb"} and treatment in {"clip", *WHOLE_BATCH}:
        return (
            f"treatment={treatment} depends on the sign of the advantage, which baseline={baseline} derives from the "
            "weights; set treatment: truncate, mask or clip_weight, or baseline: mean"
        )
    return None
