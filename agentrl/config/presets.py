"""Published policy-gradient algorithms as one line of settings each, and the combinations that make no sense.

Plain words and numbers: knows nothing of pydantic, of tensors, or of how a setting is carried out:
trainer/objective/policy_gradient.py does that. docs/algorithms.md has the equations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

Preset = Literal[
    "vcpo_safe",
    "vcpo",
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
    "reinforce",
]
Ratio = Literal["none", "token", "sequence", "geometric_mean"]
Treatment = Literal["none", "truncate", "mask", "clip", "clip_weight", "second_moment", "adaptive_clip"]
Baseline = Literal["none", "mean", "leave_one_out", "opob", "opob_safe", "length_weighted", "otb"]
StepScale = Literal["none", "ess_sqrt", "ess_linear"]
LengthNorm = bool | Literal["group"]

OPTIMAL: frozenset[str] = frozenset({"opob", "opob_safe"})

READ_BY: Mapping[str, tuple[Treatment, ...]] = {
    "max_weight": ("truncate", "mask"),
    "min_weight": ("mask",),
    "clip_low": ("clip", "clip_weight"),
    "clip_high": ("clip", "clip_weight"),
    "second_moment_bound": ("second_moment",),
    "adaptive_low": ("adaptive_clip",),
    "adaptive_high": ("adaptive_clip",),
    "adaptive_step": ("adaptive_clip",),
    "positive_share": ("adaptive_clip",),
}
"""The settings that only some treatments read, and which."""

_DEEPSEEK = {"baseline": "mean", "normalize_by_std": True, "step_scale": "none"}
_PLAIN = {"ratio": "none", "treatment": "none", "normalize_by_length": False, "step_scale": "none"}

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "vcpo_safe": {},  # the defaults of AlgorithmConfig
    "vcpo": {"baseline": "opob", "baseline_weights": "untreated"},  # as the paper writes it
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
    "bapo": {**_DEEPSEEK, "ratio": "token", "treatment": "adaptive_clip", "normalize_by_length": "group"},
    "reinforce": {**_PLAIN, "baseline": "none"},
}


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over the line of its preset: what is written out wins. An unknown name is left for the type to refuse."""
    preset = given.get("preset", "vcpo_safe")
    line = PRESETS.get(preset, {}) if isinstance(preset, str) else {}  # type: ignore[call-overload]
    return {**line, **given}


def unread(treatment: Treatment, changed: Collection[str]) -> str | None:
    """Why one of `changed`, the settings moved off their preset, does nothing, with the mend; None: all are read."""
    for name, treatments in READ_BY.items():
        if name in changed and treatment not in treatments:
            mend = f"leave it out, or set treatment: {' or '.join(treatments)}"
            return f"{name} does nothing under treatment={treatment}; {mend}"
    return None


def refusal(*, ratio: Ratio, treatment: Treatment, baseline: Baseline) -> str | None:
    """Why a combination makes no sense, with the mend; None where it does make sense."""
    if ratio == "none" and treatment != "none":
        return f"treatment={treatment} has no weights to treat under ratio=none; set treatment: none, or another ratio"
    if treatment in ("second_moment", "adaptive_clip") and ratio != "token":
        return f"treatment={treatment} is defined over the tokens of the batch; set ratio: token"
    if baseline in OPTIMAL and ratio == "token":
        return (
            f"baseline={baseline} weighs trajectories by one weight each, ratio=token has one a token; "
            "set ratio: sequence or geometric_mean, or baseline: mean or otb"
        )
    if baseline in OPTIMAL | {"otb"} and treatment in ("clip", "adaptive_clip"):
        return (
            f"treatment={treatment} cuts by the sign of the advantage, which baseline={baseline} fixes only from the "
            "weights; set treatment: truncate, mask or clip_weight, or baseline: mean"
        )
    return None
