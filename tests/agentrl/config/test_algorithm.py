"""Presets, which settings override them, and refused combinations, whose messages say how to fix them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load, parse
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import PRESETS
from agentrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


COMPARING = ("tba", "distill")  # with a frozen model


def settings(**algorithm: Any) -> AlgorithmConfig:
    model = {"path": "m", "reference": "initial"} if algorithm.get("preset") in COMPARING else {"path": "m"}
    tree = {"name": "t", "env": {"target": "x:Y"}, "model": model, "algorithm": algorithm}
    return parse(tree, source="test").algorithm


def test_vcpo_with_the_safe_baseline_is_the_default_and_the_papers_form_is_one_word() -> None:
    assert settings() == settings(preset="vcpo_safe")
    assert settings().baseline == "opob_safe"
    published = settings(baseline="opob", baseline_weights="untreated")
    assert settings(preset="vcpo") == published.model_copy(update={"preset": "vcpo"})
    assert (settings().ratio, settings().treatment, settings().max_weight) == ("sequence", "truncate", 8.0)
    assert (settings().step_scale, settings().rho_base) == ("ess_sqrt", "auto")


def test_vcpo_published_is_what_the_four_scripts_set() -> None:
    """mit-han-lab/vcpo: grad_baselining_normalize_by_length=False, norm_by_std=True (torch.std(unbiased=False)),
    base_ess_ratio=1.0 (0.55 in the multi-turn script), rollout_is_threshold=8, no filter of groups."""
    scripts = settings(preset="vcpo_published")
    changed = {name: value for name, value in scripts if value != getattr(settings(preset="vcpo"), name)}
    assert changed == {
        "preset": "vcpo_published",
        "norm_of": "sum",
        "normalize_by_std": "population",
        "rho_base": 1.0,
        "keep_equal_rewards": True,
    }
    assert settings().drops_equal_rewards and not scripts.drops_equal_rewards
    assert settings(preset="vcpo_published", rho_base=0.55).rho_base == 0.55


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_line_and_nothing_else(preset: str) -> None:
    changed = {name for name, value in settings(preset=preset) if value != getattr(settings(), name)}
    assert changed <= {"preset", *PRESETS[preset]}
    assert all(getattr(settings(preset=preset), name) == value for name, value in PRESETS[preset].items())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_one_word_on_the_command_line_and_survives_saving(preset: str) -> None:
    frozen = ["model.reference=initial"] if preset in COMPARING else []
    config = load(QUICKSTART, [f"algorithm.preset={preset}", *frozen])
    assert config.algorithm.preset == preset
    assert parse(config.model_dump(mode="json"), source="saved") == config


def test_what_is_written_out_wins_over_the_preset() -> None:
    assert settings(preset="grpo", clip_high=0.28, normalize_by_std=False) == settings(
        preset="grpo", ratio="token", treatment="clip", clip_low=0.2, clip_high=0.28, normalize_by_std=False
    )


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"ratio": "token"}, "set ratio: sequence or geometric_mean, or baseline: mean"),
        ({"treatment": "clip"}, "set treatment: truncate, mask or clip_weight, or baseline: mean"),
        ({"preset": "otb", "ratio": "token", "treatment": "clip"}, "or baseline: mean"),
        ({"preset": "m2po", "ratio": "sequence"}, "set ratio: token"),
        ({"preset": "bapo", "ratio": "geometric_mean"}, "set ratio: token"),
        ({"preset": "rloo", "treatment": "truncate"}, "set treatment: none, or another ratio"),
        ({"preset": "mis", "min_weight": 9.0}, "must be below max_weight"),
        (
            {"preset": "grpo", "max_weight": 2},
            "max_weight does nothing under .*clip; leave it out, or .*truncate or mask",
        ),
        ({"min_weight": 0.5}, "min_weight does nothing under treatment=truncate"),
        ({"preset": "cispo", "second_moment_bound": 0.1}, "set treatment: second_moment or second_moment_mask"),
        ({"preset": "m2po", "clip_high": 0.3}, "set treatment: clip or clip_weight"),
        ({"adaptive_low": [0.5, 0.9]}, "set treatment: adaptive_clip"),
        ({"preset": "bapo", "adaptive_low": [0.9, 0.6]}, "adaptive_low must rise"),
        ({"ess_floor": 0.2, "refuse_below": 0.3}, "must be below ess_floor"),
        ({"preset": "grpo", "baseline_norms": "proxy"}, "leave baseline_norms out"),
        ({"preset": "grpo", "baseline_weights": "untreated"}, "leave baseline_weights out"),
        ({"preset": "grpo", "norm_of": "sum"}, "uses no norms; leave norm_of out"),
        ({"preset": "reinforce", "keep_equal_rewards": True}, "drops no group; leave keep_equal_rewards out"),
        ({"preset": "tis", "dual_clip": 3.0}, "dual_clip does nothing under treatment=truncate"),
        ({"preset": "grpo", "dual_clip": 1.0}, "algorithm.dual_clip"),
        ({"preset": "otb", "ratio": "token", "treatment": "second_moment"}, "or baseline: mean"),
        ({"preset": "vcpoo"}, "algorithm.preset"),
        ({"ratio": "suffix"}, "ratio=suffix cuts its ratios itself.*set treatment: none, not truncate"),
        ({"ratio": "suffix", "treatment": "none"}, "ratio=suffix has one for each token; set ratio: sequence"),
        ({"vtrace_c": 0.5}, "vtrace_c does nothing under ratio=sequence; leave it out, or set ratio: suffix"),
        ({"preset": "vtrace", "vtrace_c": 2.0}, "vtrace_c=2 must be at most vtrace_rho=1"),
        ({"spurious": {"probability": 0.01, "entropy": 0.1}}, "spurious depends on the sign.*set baseline: mean"),
        ({"preset": "dapo", "spurious": {"probability": 0.01}}, "give either entropy, in nats, or entropy_quantile"),
        ({"preset": "dapo", "spurious": {"entropy": 0.5}}, "algorithm.spurious.probability"),
        ({"preset": "distill", "spurious": {"probability": 0.1, "entropy": 1}}, "leave spurious out"),
        ({"entropy_coef": -0.1}, "algorithm.entropy_coef"),
        ({"clip_lo": 0.1}, "did you mean algorithm.clip_low"),
    ],
)
def test_what_makes_no_sense_is_refused_with_how_to_fix_it(given: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        settings(**given)


@pytest.mark.parametrize("treatment", ["truncate", "mask"])
def test_a_presets_own_clips_stand_by_idle_when_another_treatment_is_written_out(treatment: str) -> None:
    found = settings(preset="dapo", treatment=treatment, max_weight=2)
    assert (found.max_weight, found.clip_high) == (2, PRESETS["dapo"]["clip_high"])
    assert AlgorithmConfig.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize("algorithm", [{}, {"preset": "reinforce", "normalize_by_std": True}])
def test_groups_of_one_need_an_algorithm_without_spread(algorithm: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reinforce"):
        load(QUICKSTART, ["rollout.group_size=1", *(f"algorithm.{k}={v}" for k, v in algorithm.items())])
    assert load(QUICKSTART, ["rollout.group_size=1", "algorithm.preset=reinforce"]).rollout.group_size == 1
