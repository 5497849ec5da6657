"""Metrics of a step from hand-made statistics, and the variance formula against a real population of gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.report.charts import CHARTS
from trainer import diagnostics
from trainer.split_variance import COMPARED
from trainer.step_stats import GroupStats, TrajectoryStats


def stats(**given: Any) -> TrajectoryStats:
    values: dict[str, Any] = {
        "id": "t",
        "episode": 0,
        "reward": 0.0,
        "log_weight": 0.0,
        "weight": 1.0,
        "num_clipped": 0,
        "num_weights": 1,
        "advantage": 0.0,
        "score_norm": 1.0,
        "lag": 0,
        "num_tokens": 20,
        "num_action_tokens": 10,
        "kl_sum": 0.0,
        "entropy_sum": 0.0,
        "num_parity_tokens": 0,
        "parity_sum": 0.0,
        "parity_max": 0.0,
        "parity_kl_sum": 0.0,
        "parity_square_sum": 0.0,
        "parity_blocks": (),
        "reference_kl_sum": None,
    }
    return TrajectoryStats(**values | given)


def group(*members: TrajectoryStats, shift: float = 0.0) -> GroupStats:
    """Each member an episode of its own."""
    return segmented(*([member] for member in members), shift=shift)


def segmented(*episodes: list[TrajectoryStats], shift: float = 0.0) -> GroupStats:
    members = tuple(replace(one, episode=number) for number, segments in enumerate(episodes) for one in segments)
    return GroupStats(trajectories=members, has_spread=True, has_gradient=True, baseline_minus_mean=shift)


def breakdowns(*groups: GroupStats, grad_norm: float | None = None) -> dict[str, float]:
    return diagnostics.breakdowns(groups, algorithm=AlgorithmConfig(), grad_norm=grad_norm)


def test_a_bucket_has_the_numbers_of_its_own_trajectories() -> None:
    young = stats(lag=0, kl_sum=1.0, advantage=1.0, score_norm=1.0)
    old = [
        stats(lag=3, log_weight=math.log(3), num_clipped=1, kl_sum=2.0, advantage=1.0, score_norm=2.0),
        stats(lag=8, log_weight=0.0, kl_sum=4.0, advantage=-1.0, score_norm=2.0),
    ]
    found = breakdowns(group(young, *old))
    assert found["vitals/lag_0_ess_ratio"] == 1.0
    assert found["vitals/lag_3_8_ess_ratio"] == pytest.approx(16 / 20)
    assert found["vitals/lag_3_8_max_weight"] == pytest.approx(3.0)
    assert found["vitals/lag_3_8_clip_fraction"] == 0.5
    assert found["vitals/lag_3_8_kl"] == pytest.approx(6 / 20)
    assert found["vitals/lag_3_8_gradient_share"] == pytest.approx(8 / 9)
    assert not any(name.startswith("vitals/lag_1_2") for name in found)


def test_length_buckets_end_at_their_edge() -> None:
    found = breakdowns(group(*(stats(num_action_tokens=n) for n in (128, 129, 3000))))
    assert {name.split("_ess")[0] for name in found if name.startswith("vitals/length") and "ess" in name} == {
        "vitals/length_to_128",
        "vitals/length_to_512",
        "vitals/length_above",
    }


def test_contributions_of_all_buckets_add_up_to_one() -> None:
    found = breakdowns(group(*(stats(lag=lag, advantage=0.5, score_norm=lag + 1.0) for lag in (0, 1, 5, 20))))
    assert sum(v for k, v in found.items() if "lag" in k and k.endswith("gradient_share")) == pytest.approx(1.0)


def test_the_share_that_was_cut_counts_weights_not_trajectories() -> None:
    found = diagnostics.weights(
        [group(stats(num_clipped=3, num_weights=9), stats(num_clipped=0, num_weights=1))], max_weight=None
    )
    assert found["learner/clip_fraction"] == pytest.approx(0.3)


def test_baselines_against_the_mean() -> None:
    found = diagnostics.weights([group(stats(), shift=-0.3), group(stats(), shift=0.1)], max_weight=8.0)
    assert found["learner/baseline_minus_mean"] == pytest.approx(-0.1)
    assert found["learner/baseline_minus_mean_min"] == -0.3
    assert found["learner/baseline_minus_mean_max"] == 0.1
    assert found["learner/baseline_above_mean"] == 0.5


def test_variance_equals_the_mean_over_all_splits_into_halves() -> None:
    """Four vectors: tr Cov of their mean, by the formula and by |mean of half - mean of other half|^2 / 4."""
    x = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5], [-1.0, 1.0]], dtype=torch.float64)
    splits = list(itertools.combinations(range(4), 2))
    by_splitting = sum(
        float((x[list(half)].mean(0) - x[[i for i in range(4) if i not in half]].mean(0)).square().sum()) / 4
        for half in splits
    ) / len(splits)
    batch = group(*(stats(advantage=1.0, score_norm=float(row.norm())) for row in x))
    found = diagnostics.variance([batch], algorithm=AlgorithmConfig(), grad_norm=float(x.mean(0).norm()))
    assert found["vitals/variance"] == pytest.approx(by_splitting)


def test_of_all_baselines_the_optimal_one_has_the_least_variance() -> None:
    rewards, norms, weights = (1.0, 0.0, 0.0, 1.0), (1.0, 3.0, 2.0, 0.5), (1.0, 0.5, 2.0, 1.5)
    batch = group(
        *(stats(reward=r, score_norm=n, weight=w, advantage=r) for r, n, w in zip(rewards, norms, weights, strict=True))
    )
    found = diagnostics.variance([batch], algorithm=AlgorithmConfig(), grad_norm=0.1)
    others = [value for name, value in found.items() if name.startswith("vitals/variance_") and "opob" not in name]
    assert len(others) == 4
    assert all(found["vitals/variance_opob"] < other for other in others)
    assert found["vitals/variance"] == pytest.approx(found["vitals/variance_none"])


def test_the_variance_of_segmented_episodes_is_that_of_episodes() -> None:
    """By hand: weighted scores of sizes 5 (of 3 and 4) and 1, rewards 1 and 0, 40 and 10 action tokens, |g| = 0.1.

    b* = 25/26, so 25 (1/26)^2 + (25/26)^2 = 25/26 is its sum of squares.
    """
    first = {"reward": 1.0, "advantage": 0.5}
    second = {"reward": 0.0, "advantage": -0.5}
    batch = segmented(
        [stats(weight=1.5, score_norm=2.0, **first), stats(weight=2.0, score_norm=2.0, num_action_tokens=30, **first)],
        [stats(score_norm=1.0, num_action_tokens=8, **second), stats(score_norm=0.0, num_action_tokens=2, **second)],
    )
    squares = {
        "variance": 6.5,
        "variance_none": 25.0,
        "variance_mean": 6.5,
        "variance_leave_one_out": 26.0,
        "variance_length_weighted": 25 * 0.2**2 + 0.8**2,
        "variance_opob": 25 / 26,
        "variance_opob_safe": 6.5,
        "variance_opob_leave_one_out": 26.0,
        "variance_opob_safe_leave_one_out": 26.0,
    }
    found = diagnostics.variance([batch], algorithm=AlgorithmConfig(), grad_norm=0.1)
    expected = {f"vitals/{name}": (square - 2 * 0.1**2) / 2 for name, square in squares.items()}
    assert found == pytest.approx(expected | {"vitals/noise_to_signal": expected["vitals/variance"] / 0.1**2})
    halved = diagnostics.variance([batch], algorithm=AlgorithmConfig(normalize_by_std=True), grad_norm=0.1)
    assert halved["vitals/variance_none"] == pytest.approx((25.0 / 0.5 - 2 * 0.1**2) / 2)


def test_episodes_without_an_action_count_in_the_size_of_the_batch() -> None:
    silent = group(stats(weight=1.0, score_norm=0.0), stats(weight=1.0, score_norm=0.0))
    acting = segmented([stats(advantage=1.0), stats(advantage=1.0)], [stats(advantage=-1.0)])
    found = diagnostics.variance([acting, silent], algorithm=AlgorithmConfig(), grad_norm=0.0)
    assert found["vitals/variance"] == pytest.approx(3 / (4 * 3))


def test_without_norms_there_is_no_variance_and_no_share() -> None:
    found = breakdowns(group(stats(score_norm=0.0, advantage=1.0), stats(score_norm=0.0)), grad_norm=1.0)
    assert not any("variance" in name or "share" in name for name in found)


def test_norms_by_proxy_give_no_variance() -> None:
    batch = [group(stats(advantage=1.0), stats(advantage=-1.0))]
    assert diagnostics.variance(batch, algorithm=AlgorithmConfig(), grad_norm=0.1)
    assert not diagnostics.variance(batch, algorithm=AlgorithmConfig(baseline_norms="proxy"), grad_norm=0.1)


@pytest.mark.parametrize(("mean_weight", "num_alarms"), [(0.79, 1), (0.8, 0), (1.25, 0), (1.26, 1)])
def test_the_mean_weight_alarms_outside_its_range(mean_weight: float, num_alarms: int) -> None:
    assert len(diagnostics.alarms(mean_weight)) == num_alarms


def test_the_mean_weight_of_replayed_groups_does_not_alarm() -> None:
    many = [group(stats(log_weight=0.0, lag=1), stats(log_weight=9.0, lag=40))]
    assert diagnostics.mean_weight(many, max_lag=2) == 1.0
    (alarm,) = diagnostics.alarms(diagnostics.mean_weight(many), lower="rollout.oversample or learner.lr")
    assert alarm.endswith("lower rollout.oversample or learner.lr")


@pytest.mark.parametrize(("masked_share", "num_alarms"), [(0.9, 0), (0.95, 1), (1.0, 0)])
def test_a_step_that_hardly_trains_alarms(masked_share: float, num_alarms: int) -> None:
    found = diagnostics.alarms(1.0, masked_share=masked_share)
    assert len(found) == num_alarms and all("lower rollout.oversample" in one for one in found)


def test_no_alarm_for_what_was_not_measured() -> None:
    assert diagnostics.alarms(diagnostics.mean_weight([])) == []


ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(ANY, st.floats(-1e4, 1e4) | ANY, ANY, st.integers(0, 40)), min_size=2, max_size=8))
def test_every_number_is_finite_whatever_the_trajectories_are(rows: list[tuple[float, float, float, int]]) -> None:
    batch = [
        group(
            *(
                stats(
                    reward=r,
                    log_weight=w,
                    weight=math.exp(min(w, 5)) if w == w else w,
                    score_norm=n,
                    advantage=r,
                    lag=lag,
                )
                for r, w, n, lag in rows
            )
        )
    ]
    found = diagnostics.counts(batch) | diagnostics.policy(batch) | diagnostics.weights(batch, max_weight=8.0)
    found |= diagnostics.breakdowns(batch, algorithm=AlgorithmConfig(), grad_norm=1.0)
    assert all(math.isfinite(value) for value in found.values())


def test_every_chart_of_vital_signs_has_a_metric_of_that_name() -> None:
    lags, lengths = (0, 1, 5, 20), (1, 200, 1000, 5000)
    rows = zip(lags, lengths, (1.0, 0.0, 0.0, 1.0), strict=True)
    batch = group(*(stats(lag=lag, num_action_tokens=n, reward=r, advantage=r - 0.5) for lag, n, r in rows))
    drawn = {metric for chart in CHARTS for metric in chart.curves.values() if metric.startswith("vitals/")}
    measured = {f"vitals/split_variance_{name}" for name in COMPARED}
    assert drawn <= set(breakdowns(batch, grad_norm=0.1)) | measured


def test_the_ess_ratio_without_lag_is_measured_where_the_present_version_sampled_everything() -> None:
    whole = [stats(log_weight=math.log(w), num_parity_tokens=10, parity_square_sum=1.0) for w in (1.0, 4.0)]
    assert diagnostics.on_policy_ratio([group(*whole)]) == pytest.approx(25 / 34)
    silent = stats(num_action_tokens=0)
    assert diagnostics.on_policy_ratio([group(*whole, silent)]) == pytest.approx(25 / 34)
    assert diagnostics.on_policy_ratio([group(silent)]) is None


def test_under_lag_the_ess_ratio_without_lag_comes_from_the_tokens_of_the_present_version_alone() -> None:
    """256 tokens with a mean square of 1e-4; the weights of lag, e^+-3, do not enter."""
    fresh = {"num_parity_tokens": 128, "parity_square_sum": 0.0128}
    lagged = [
        stats(log_weight=3.0, lag=2, num_action_tokens=1000, **fresh),
        stats(log_weight=-3.0, lag=2, num_action_tokens=4000, **fresh),
    ]
    # rho = 1 / mean(exp(sigma^2)) with sigma^2 = 1000 * 1e-4 and 4000 * 1e-4
    expected = 2 / (math.exp(0.1) + math.exp(0.4))
    assert diagnostics.on_policy_ratio([group(*lagged)]) == pytest.approx(expected)
    assert diagnostics.on_policy_ratio([group(replace(lagged[0], num_parity_tokens=127), lagged[1])]) is None
    noisy = [replace(one, parity_square_sum=12800.0) for one in lagged]
    assert diagnostics.on_policy_ratio([group(*noisy)]) == 0.5  # 1/B
