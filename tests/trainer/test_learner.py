"""A whole step through DeepSpeed: against plain torch, over ZeRO stages; what it refuses and what it reports."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import parse
from agentrl.errors import ConfigError, LearnerError, StaleTrajectoryError
from agentrl.report import learner_notes
from agentrl.run_folder import RunFolder
from agentrl.testing import group, with_members
from agentrl.types import Trajectory, TrajectoryGroup, VersionSpan
from tests.trainer.trainer_builders import batch, config, divide_small_weights, episode, mixed_groups, whole_weights
from trainer import deepspeed_settings
from trainer.gradient import handoff
from trainer.gradient.step_gradient import Estimator
from trainer.gradient.sums import GradientSums
from trainer.learner import Learner
from trainer.objective import vcpo

LR, CLIP = 1e-3, 0.05
SETTINGS = {"lr": LR, "grad_clip": CLIP, "weight_decay": 0.01}


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


class Plain:
    """Plain torch's clip and AdamW, given the learner's gradient of each step, with the rate scaled by sqrt(rho).

    The estimator's own gradient on the same weights is compared with it. It is not stepped with: AdamW divides each
    element by its own size, so it would turn the rounding of the smallest elements, which depends on the processor,
    into whole steps.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)

    def step(self, groups: list[TrajectoryGroup], version: int, gradients: list[torch.Tensor]) -> None:
        estimator = Estimator(self.model, config(Path()).algorithm)
        stats = estimator.estimate(groups, policy_version=version, num_episodes=12)
        log_weight_B = torch.tensor([m.log_weight for g in stats for m in g.trajectories], dtype=torch.float64)
        own, given = (torch.cat([one.double().flatten() for one in many]) for many in (estimator.sums.total, gradients))
        assert float((given - own).norm() / own.norm()) < 1e-5
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = -gradient * min(1.0, CLIP / float(given.norm()))
        self.optimizer.param_groups[0]["lr"] = LR * float(vcpo.ess_ratio(log_weight_B)) ** 0.5
        self.optimizer.step()


def updates(
    learner: Learner, model: Any, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """What three steps through DeepSpeed and in plain torch add to the weights."""
    handed_over: list[list[torch.Tensor]] = []
    own = handoff.hand_over

    def hand_over(engine: Any, sums: GradientSums, *, factor: float) -> None:
        handed_over.append([total.clone() for total in sums.total])
        own(engine, sums, factor=factor)

    monkeypatch.setattr(handoff, "hand_over", hand_over)
    plain, before = Plain(model), weights_of(model)
    for version in range(3):
        learner.step(batch(groups, version=version))
        plain.step(groups, version, handed_over[version])
    return whole_weights(learner.model) - before, weights_of(model) - before


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_steps_through_deepspeed_equal_plain_torch(
    tiny_model_dir: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    groups = mixed_groups(tiny_model)
    learner = Learner(config(tiny_model_dir, learner={**SETTINGS, "zero_stage": zero_stage}))
    ours, theirs = updates(learner, tiny_model, groups, monkeypatch)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert learner.engine.optimizer.param_groups[0]["lr"] == LR


def test_weights_divided_by_zero_3_make_the_same_steps(
    tiny_model_dir: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_settings, "deepspeed_config", deepspeed_settings.deepspeed_config)
    divide_small_weights()
    groups = mixed_groups(tiny_model)
    learner = Learner(config(tiny_model_dir, learner={**SETTINGS, "zero_stage": 3}))
    assert all(parameter.numel() == 0 for parameter in learner.model.parameters())
    ours, theirs = updates(learner, tiny_model, groups, monkeypatch)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_the_schedule_multiplies_the_rate_beside_the_ess_ratio(tiny_model_dir: Path, tiny_model: Any) -> None:
    settings = {"lr": LR, "warmup_steps": 2, "schedule": "linear"}
    learner, groups = Learner(config(tiny_model_dir, learner=settings, train={"steps": 4})), mixed_groups(tiny_model)
    used = []
    for version in range(4):
        metrics = learner.step(batch(groups, version=version, max_lag=4)).metrics
        assert metrics["learner/lr_scale"] == pytest.approx(metrics["learner/ess_ratio"] ** 0.5)
        used.append(metrics["learner/lr"] / metrics["learner/lr_scale"])
        assert learner.engine.optimizer.param_groups[0]["lr"] == LR
    assert used == pytest.approx([LR / 2, LR, LR, LR / 2])


def test_a_step_of_half_the_rate_moves_the_weights_half_as_far(tiny_model_dir: Path, tiny_model: Any) -> None:
    moved = []
    for warmup_steps in (0, 2):
        learner = Learner(config(tiny_model_dir, learner={"lr": LR, "warmup_steps": warmup_steps}))
        before = weights_of(learner.model)
        learner.step(batch(mixed_groups(tiny_model)))
        moved.append(float((weights_of(learner.model) - before).norm()))
    assert moved[1] == pytest.approx(moved[0] / 2, rel=1e-3)


def plain_norm(model: Any, groups: list[TrajectoryGroup]) -> float:
    estimator = Estimator(model, config(Path()).algorithm)
    estimator.estimate(groups, policy_version=0, num_episodes=12)
    return float(torch.cat([total.double().flatten() for total in estimator.sums.total]).norm())


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_the_reported_norm_is_that_before_clipping(tiny_model_dir: Path, tiny_model: Any, zero_stage: int) -> None:
    groups = mixed_groups(tiny_model)
    learner = Learner(config(tiny_model_dir, learner={**SETTINGS, "grad_clip": 1e-3, "zero_stage": zero_stage}))
    reported = learner.step(batch(groups)).metrics["learner/grad_norm"]
    assert reported == pytest.approx(plain_norm(tiny_model, groups), rel=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_bfloat16_steps_move_the_weights(tiny_model_dir: Path, tiny_model: Any, zero_stage: int) -> None:
    settings = config(tiny_model_dir, dtype="bfloat16", learner={"lr": 1e-2, "zero_stage": zero_stage})
    learner = Learner(settings)
    before, groups = weights_of(learner.model), mixed_groups(tiny_model)
    output = learner.step(batch(groups))
    assert output.metrics["learner/grad_norm"] == pytest.approx(plain_norm(tiny_model, groups), rel=0.1)
    assert not torch.equal(before, weights_of(learner.model))
    assert all(math.isfinite(value) for value in output.metrics.values())


@pytest.mark.parametrize(("norms", "is_told"), [("exact", True), ("proxy", False)])
def test_where_memory_is_short_the_price_of_exact_norms_is_told(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture, norms: str, is_told: bool
) -> None:
    with caplog.at_level(logging.INFO):
        Learner(config(tiny_model_dir, learner={"offload_optimizer": True}, algorithm={"baseline_norms": norms}))
    assert ("two_pass keeps none" in caplog.text) == is_told


@pytest.fixture
def learner(tiny_model_dir: Path) -> Learner:
    return Learner(config(tiny_model_dir, learner={"lr": 1e-3}))


METRICS = [
    "ess_ratio",
    "ess_ratio_truncated",
    "mean_weight",
    "max_weight",
    "clip_fraction",
    "lr",
    "lr_scale",
    "rho_base",
    "grad_norm",
    "kl",
    "entropy",
    "baseline_minus_mean",
    "baseline_minus_mean_min",
    "baseline_minus_mean_max",
    "baseline_above_mean",
    "zero_variance_groups",
    "groups_without_gradient",
    "lag_mean",
    "lag_max",
    "num_trajectories",
    "num_tokens",
    "num_action_tokens",
    "step_s",
    "tokens_per_s",
    "skipped_steps",
    "parity_mean_abs",
    "parity_kl",
    "parity_max_abs",
    "parity_sigma_1",
    "ess_ratio_on_policy",
]


def test_a_step_reports_every_metric_finite_and_advances_the_version(learner: Learner, tiny_model: Any) -> None:
    output = learner.step(batch(mixed_groups(tiny_model)))
    assert output.policy_version == learner.policy_version == 1
    assert {name for name in output.metrics if not name.startswith("vitals/")} == {f"learner/{x}" for x in METRICS}
    assert output.ess_ratio == output.metrics["learner/ess_ratio"]
    assert all(math.isfinite(value) for value in output.metrics.values())
    assert output.metrics["learner/zero_variance_groups"] == 1.0
    assert output.metrics["learner/num_trajectories"] == 12.0


def test_parity_on_fresh_data_is_rounding(learner: Learner, tiny_model: Any) -> None:
    output = learner.step(batch(mixed_groups(tiny_model, off_policy=0.0)))
    metrics = output.metrics
    assert metrics["learner/parity_max_abs"] < 1e-4
    assert (output.parity_max_abs, output.parity_mean_abs) == (
        metrics["learner/parity_max_abs"],
        metrics["learner/parity_mean_abs"],
    )
    assert metrics["learner/ess_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["learner/kl"] < 1e-6


def test_a_step_raises_the_likelihood_of_what_was_rewarded(learner: Learner, tiny_model: Any) -> None:
    good, bad = episode("good", reward=1.0, model=tiny_model), episode("bad", reward=0.0, seed=1, model=tiny_model)

    def advantage() -> float:
        sums = [
            sum(x for x, acted in zip(learner.logprobs(e.token_ids()), e.action_mask()[1:], strict=True) if acted)
            for e in (good, bad)
        ]
        return sums[0] - sums[1]

    before = advantage()
    learner.step(batch([group(0, [good, bad])]))
    assert advantage() > before


def test_a_stale_trajectory_is_refused_by_name(learner: Learner, tiny_model: Any) -> None:
    learner.policy_version = 3
    fresh, stale = (episode(name, reward=1.0, version=v) for name, v in (("fresh", 2), ("old-one", 0)))
    with pytest.raises(StaleTrajectoryError, match="old-one has lag 3"):
        learner.step(batch([group(0, [fresh, stale])], version=3, max_lag=2))


def test_lagged_data_does_not_become_the_base_of_the_step_size(tiny_model_dir: Path, tiny_model: Any) -> None:
    settings = {"rho_base": "auto", "step_scale": "ess_sqrt"}
    learner = Learner(config(tiny_model_dir, learner={"lr": 1e-6}, algorithm=settings), policy_version=2)
    lagged = mixed_groups(tiny_model, off_policy=1.0)
    for version in (2, 3):
        metrics = learner.step(batch(lagged, version=version, max_lag=4)).metrics
        assert metrics["learner/ess_ratio"] < 0.7
        assert metrics["learner/rho_base"] == 1.0
        assert metrics["learner/lr_scale"] == pytest.approx(math.sqrt(metrics["learner/ess_ratio"]))
    fresh = mixed_groups(tiny_model, off_policy=0.0, version=4)
    assert learner.step(batch(fresh, version=4)).metrics["learner/rho_base"] == pytest.approx(1.0, abs=1e-4)


def test_what_is_trained_again_may_have_any_lag(learner: Learner) -> None:
    learner.policy_version = 3
    groups = [group(n, [episode(f"{n}{m}", reward=m, version=v) for m in (0, 1)]) for n, v in ((0, 3), (1, 0))]
    again = replace(batch(groups, version=3, max_lag=1), num_replayed=1)
    assert learner.step(again).metrics["learner/lag_max"] == 3
    learner.policy_version = 3
    assert learner.step(replace(again, num_replayed=0, max_lag=None)).metrics["learner/lag_max"] == 3
    learner.policy_version = 3
    with pytest.raises(StaleTrajectoryError):
        learner.step(replace(again, groups=tuple(reversed(groups))))


@pytest.mark.parametrize("partial", ["keep", "mask"])
def test_of_partial_episodes_only_old_tokens_have_weights_other_than_one(
    tiny_model_dir: Path, tiny_model: Any, partial: str
) -> None:
    """Each completion's first token is of the version before, and was 0.25 nats likelier then."""

    def partly_old(one: Trajectory) -> Trajectory:
        turns = []
        for turn in one.turns:
            said, end = turn.completion, len(turn.completion.token_ids)
            first = VersionSpan(version=1, start=0, end=1)
            rest = (VersionSpan(version=2, start=1, end=end),) if end > 1 else ()
            logprobs = (said.behavior_logprobs[0] - 0.25, *said.behavior_logprobs[1:])
            turns.append(
                replace(turn, completion=replace(said, behavior_logprobs=logprobs, version_spans=(first, *rest)))
            )
        return replace(one, turns=tuple(turns))

    members = [partly_old(episode(str(m), reward=m, seed=m, model=tiny_model)) for m in (0, 1)]
    rollout = {"max_lag": 0, "on_stale": "finish", "oversample": 2, "partial": partial}
    settings = parse(config(tiny_model_dir).model_dump() | {"rollout": rollout}, source="test")
    learner = Learner(settings, policy_version=2)
    metrics = learner.step(replace(batch([group(0, members)], version=2), max_lag=None)).metrics
    expected = {"keep": (math.exp(2 * 0.25), 1), "mask": (1.0, 0)}[partial]  # two turns each
    assert (metrics["learner/max_weight"], metrics["learner/lag_max"]) == pytest.approx(expected, rel=1e-4)
    assert metrics.get("learner/masked_share") == (None if partial == "keep" else pytest.approx(2 / 7))
    old = replace(batch([group(1, [episode(str(m), reward=m, version=1) for m in (0, 1)])], version=3), max_lag=None)
    output = learner.step(old)
    assert output.skipped == (partial == "mask") and output.policy_version == 4


def test_tokens_of_a_future_version_are_refused(learner: Learner) -> None:
    with pytest.raises(LearnerError, match="future version 5"):
        learner.step(batch([group(0, [episode("a", reward=1.0, version=5)])]))


def test_a_batch_for_another_version_is_refused(learner: Learner, tiny_model: Any) -> None:
    with pytest.raises(LearnerError, match="version 4"):
        learner.step(batch(mixed_groups(tiny_model), version=4))


def test_an_empty_batch_is_refused(learner: Learner) -> None:
    with pytest.raises(LearnerError, match="empty"):
        learner.step(batch([]))


def test_a_nan_refuses_the_step_keeps_the_weights_and_names_the_trajectory(
    learner: Learner, tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    groups, before = mixed_groups(tiny_model), weights_of(learner.model)
    poisoned = replace(groups[0].trajectories[1], reward=math.nan, id="poisoned")
    broken = with_members(groups[0], (groups[0].trajectories[0], poisoned))
    with caplog.at_level(logging.WARNING):
        output = learner.step(batch([broken, groups[1]]))
    assert torch.equal(before, weights_of(learner.model))
    assert output.policy_version == 1 and output.skipped and output.metrics["learner/skipped_steps"] == 1.0
    assert "poisoned: reward not finite" in caplog.text
    assert all(math.isfinite(value) for value in output.metrics.values())
    again = learner.step(batch(groups, version=1))
    assert not again.skipped and again.metrics["learner/skipped_steps"] == 1.0
    assert not torch.equal(before, weights_of(learner.model))


def test_too_small_an_ess_ratio_refuses_the_step_where_so_set(
    tiny_model_dir: Path, tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    groups = mixed_groups(tiny_model, off_policy=0.3)
    learner = Learner(config(tiny_model_dir, algorithm={"refuse_below": 0.95}, learner={"lr": 1e-3}))
    before = weights_of(learner.model)
    output = learner.step(batch(groups))
    assert output.ess_ratio is not None and output.ess_ratio < 0.95
    assert torch.equal(before, weights_of(learner.model)) and output.metrics["learner/skipped_steps"] == 1.0
    assert "refuse_below" in caplog.text


def test_nan_weights_refuse_every_step(learner: Learner, tiny_model: Any) -> None:
    with torch.no_grad():
        learner.model.model.norm.weight[0] = math.nan
    output = learner.step(batch(mixed_groups(tiny_model)))
    assert output.metrics["learner/skipped_steps"] == 1.0
    assert all(math.isfinite(value) for value in output.metrics.values())


def test_a_batch_without_any_reward_spread_is_a_step_of_zero_gradient(learner: Learner, tiny_model: Any) -> None:
    metrics = learner.step(batch(mixed_groups(tiny_model)[2:])).metrics
    assert metrics["learner/grad_norm"] == 0.0
    assert metrics["learner/groups_without_gradient"] == 1.0


def test_metrics_do_not_depend_on_how_groups_are_ordered(tiny_model_dir: Path, tiny_model: Any) -> None:
    groups = mixed_groups(tiny_model, off_policy=0.3)
    seen = [
        Learner(config(tiny_model_dir, learner={"lr": 1e-3})).step(batch(order)).metrics
        for order in (groups, groups[::-1])
    ]
    for name in ("ess_ratio", "grad_norm", "baseline_minus_mean"):
        assert seen[0][f"learner/{name}"] == pytest.approx(seen[1][f"learner/{name}"], rel=1e-5)


def test_a_missing_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        Learner(config(tmp_path / "nowhere"))


def test_variance_is_measured_on_the_steps_it_is_asked_for(tiny_model_dir: Path, tiny_model: Any) -> None:
    learner = Learner(config(tiny_model_dir, algorithm={"variance_every": 2}, learner={"lr": 1e-3}))
    measured = []
    for version in range(3):
        output = learner.step(batch(mixed_groups(tiny_model, version=version), version=version))
        measured.append("vitals/split_variance_opob" in output.metrics)
    assert measured == [True, False, True]


def test_a_refused_step_measures_no_variance(tiny_model_dir: Path, tiny_model: Any) -> None:
    learner = Learner(config(tiny_model_dir, algorithm={"variance_every": 1}))
    groups = mixed_groups(tiny_model)
    poisoned = replace(groups[0].trajectories[1], reward=math.nan)
    broken = with_members(groups[0], (groups[0].trajectories[0], poisoned))
    metrics = learner.step(batch([broken, *groups[1:]])).metrics
    assert metrics["learner/skipped_steps"] == 1.0
    assert not any("split_variance" in name for name in metrics)
    assert all(map(math.isfinite, metrics.values()))


def test_viewers_are_told_why_each_episode_was_pushed(tiny_model_dir: Path, tiny_model: Any, tmp_path: Path) -> None:
    """b* is the mean of the rewards by the shares that are written; tokens' log-ratios sum up to the weight's."""
    learner = Learner(config(tiny_model_dir, algorithm={"preset": "vcpo"}, metrics={"annotate": 1.0}))
    groups = mixed_groups(tiny_model)
    learner.step(batch(groups))
    run = RunFolder(path=tmp_path)
    found = [one for stats in learner.last_stats for one in stats.annotations(is_refused=False)]
    learner_notes.write(run, 1, found)
    notes = learner_notes.read(run, 1)
    for group_ in groups[:2]:
        mine = [notes[one.id] for one in group_.trajectories]
        assert sum(one.baseline_share for one in mine) == pytest.approx(1.0)
        optimum = sum(one.baseline_share * reward for one, reward in zip(mine, group_.rewards_G, strict=True))
        mean = sum(group_.rewards_G) / len(mine)
        assert mine[0].baseline_minus_mean == pytest.approx(optimum - mean, abs=1e-9)
        for one, trajectory in zip(mine, group_.trajectories, strict=True):
            assert one.advantage == pytest.approx(trajectory.reward - optimum) and one.score_norm > 0
            assert len(one.tokens.log_ratio_N) == len(one.tokens.entropy_N) == trajectory.num_action_tokens
            assert sum(one.tokens.log_ratio_N) == pytest.approx(one.log_weight, abs=1e-3)
    assert {one.baseline_share for one in (notes[t.id] for t in groups[2].trajectories)} == {None}
