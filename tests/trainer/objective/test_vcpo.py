"""ESS ratio, step scale, optimal baseline and rho_base against numbers worked by hand or in float64."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.objective.vcpo import (
    RhoBase,
    ess_ratio,
    leave_one_out_baseline,
    optimal_baseline,
    safe_baseline,
    safe_leave_one_out_baseline,
    step_scale,
)

LOG_WEIGHTS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ess_ratio_of_weights_one_and_three_is_four_fifths() -> None:
    # (1 + 3)^2 / (2 * (1 + 9)) = 16 / 20
    assert ess_ratio(f64(0.0, math.log(3))).item() == pytest.approx(0.8, rel=1e-14)


@pytest.mark.parametrize("level", [-1e4, -1000.0, 0.0, 1000.0, 1e4])
def test_ess_ratio_of_equal_weights_is_one_at_any_size(level: float) -> None:
    assert ess_ratio(f64(*[level] * 7)).item() == 1.0


def test_one_dominant_weight_gives_one_over_batch() -> None:
    assert ess_ratio(f64(1e4, -1e4, 0.0, 0.0)).item() == pytest.approx(0.25, rel=1e-14)


@given(LOG_WEIGHTS)
def test_ess_ratio_lies_between_one_over_batch_and_one(log_weights: list[float]) -> None:
    assert 1 / len(log_weights) <= ess_ratio(f64(*log_weights)).item() <= 1.0


@given(LOG_WEIGHTS, st.floats(-1000, 1000))
def test_ess_ratio_ignores_a_constant_added_to_all(log_weights: list[float], constant: float) -> None:
    shifted = ess_ratio(f64(*log_weights) + constant).item()
    assert shifted == pytest.approx(ess_ratio(f64(*log_weights)).item(), rel=1e-9)


@given(st.permutations(list(range(6))))
def test_ess_ratio_does_not_depend_on_order(order: list[int]) -> None:
    log_weight_B = f64(0.3, -2.0, 5.0, 0.0, -0.1, 1.0)
    assert ess_ratio(log_weight_B[order]).item() == pytest.approx(ess_ratio(log_weight_B).item(), rel=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ess_ratio_refuses_what_is_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        ess_ratio(f64(0.0, bad))


def test_ess_ratio_refuses_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ess_ratio(f64())


@pytest.mark.parametrize(
    ("rho", "rho_base", "kind", "expected"),
    [
        (0.25, 1.0, "ess_sqrt", 0.5),
        (0.25, 1.0, "ess_linear", 0.25),
        (0.25, 0.5, "ess_sqrt", math.sqrt(0.5)),
        (0.9, 0.55, "ess_sqrt", 1.0),
        (0.25, 1.0, "none", 1.0),
    ],
)
def test_step_scale_by_hand(rho: float, rho_base: float, kind: str, expected: float) -> None:
    assert step_scale(rho, rho_base, kind) == pytest.approx(expected, rel=1e-15)  # type: ignore[arg-type]


def test_a_nan_never_gets_the_full_rate() -> None:
    with pytest.raises(ValueError, match="finite"):
        step_scale(math.nan, 1.0, "ess_sqrt")


def test_optimal_baseline_by_hand_uses_each_weight_squared_once() -> None:
    # w = (1, 2), n = (3, 1), R = (1, 0): 1*9*1 / (1*9 + 4*1) = 9/13. With w^4 it would be 9/25.
    b = optimal_baseline(f64(0.0, math.log(2)), f64(3.0, 1.0), f64(1.0, 0.0))
    assert b is not None and b.item() == pytest.approx(9 / 13, rel=1e-14)


def test_optimal_baseline_of_equal_weights_and_norms_is_the_mean() -> None:
    b = optimal_baseline(f64(0.7, 0.7, 0.7), f64(2.0, 2.0, 2.0), f64(1.0, 0.0, 0.5))
    assert b is not None and b.item() == pytest.approx(0.5, rel=1e-14)


@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(0, 1e6), st.floats(-10, 10)), min_size=1, max_size=12).filter(
        lambda rows: any(norm > 0 for _, norm, _ in rows)
    )
)
def test_optimal_baseline_lies_within_the_rewards(rows: list[tuple[float, float, float]]) -> None:
    log_weight, norm, reward = (f64(*column) for column in zip(*rows, strict=True))
    b = optimal_baseline(log_weight, norm, reward)
    assert b is not None and reward.min() <= b <= reward.max()


def test_optimal_baseline_of_vanishing_weights_is_still_defined() -> None:
    b = optimal_baseline(f64(-1e4, -1e4), f64(1.0, 1.0), f64(1.0, 0.0))
    assert b is not None and b.item() == pytest.approx(0.5)


def test_no_gradient_anywhere_has_no_baseline() -> None:
    assert optimal_baseline(f64(0.0, 0.0), f64(0.0, 0.0), f64(1.0, 0.0)) is None


def test_masked_trajectories_have_no_say_and_a_group_of_them_no_baseline() -> None:
    b = optimal_baseline(f64(-math.inf, 0.0, 0.0), f64(9.0, 1.0, 1.0), f64(1.0, 0.0, 0.5))
    assert b is not None and b.item() == pytest.approx(0.25)
    assert optimal_baseline(f64(-math.inf, -math.inf), f64(1.0, 1.0), f64(1.0, 0.0)) is None


def test_a_success_that_owns_the_norms_takes_the_optimum_with_it_but_not_the_safe_baseline() -> None:
    log_weight, norm, reward = f64(math.log(8), 0.0, 0.0, 0.0), f64(10.0, 1.0, 1.0, 1.0), f64(1.0, 0.0, 0.0, 0.0)
    optimum, safe = optimal_baseline(log_weight, norm, reward), safe_baseline(log_weight, norm, reward)
    assert optimum is not None and optimum.item() == pytest.approx(6400 / 6403)
    assert safe is not None and safe.item() == 0.25


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(1e-3, 1e3), st.floats(-10, 10)), min_size=1, max_size=12))
def test_the_safe_baseline_is_the_optimum_or_the_mean_whichever_is_lower(
    rows: list[tuple[float, float, float]],
) -> None:
    columns = [f64(*column) for column in zip(*rows, strict=True)]
    safe, optimum = safe_baseline(*columns), optimal_baseline(*columns)
    assert safe is not None and optimum is not None
    assert safe == min(optimum, columns[2].mean())


def _bandit() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four arms: behaviour mu, weights w = pi/mu, scores grad log pi(a) = e_a - pi, rewards."""
    pi, mu = f64(0.5, 0.2, 0.2, 0.1), f64(0.1, 0.3, 0.2, 0.4)
    return mu, pi / mu, torch.eye(4, dtype=torch.float64) - pi, f64(0.0, 1.0, 0.2, 1.0)


def _moments(baseline: float) -> tuple[torch.Tensor, float]:
    """Exact mean and trace of the covariance of w (R - b) grad log pi under mu."""
    mu, w, score, reward = _bandit()
    sample = (w * (reward - baseline))[:, None] * score
    mean = (mu[:, None] * sample).sum(0)
    return mean, float((mu * sample.square().sum(1)).sum() - mean.square().sum())


def _bandit_optimum() -> float:
    mu, w, score, reward = _bandit()
    # Each arm counts mu times: sqrt(mu) in the weight is mu in its square.
    b = optimal_baseline(w.log() + mu.log() / 2, score.norm(dim=1), reward)
    assert b is not None
    return b.item()


def test_a_constant_baseline_leaves_the_expected_gradient_unchanged() -> None:
    # Each side has four terms below 1/2 of four roundings each and three additions: 2 * (16 + 3) / 2 * 2^-53.
    torch.testing.assert_close(_moments(_bandit_optimum())[0], _moments(0.0)[0], rtol=0, atol=19 * 2.0**-53)


def test_of_all_constants_the_optimum_has_the_least_gradient_variance() -> None:
    mu, _, _, reward = _bandit()
    others = [0.0, float((mu * reward).sum()), 1.0, _bandit_optimum() + 0.02, _bandit_optimum() - 0.02]
    assert all(_moments(_bandit_optimum())[1] < _moments(other)[1] for other in others)


def _expected_over_groups(rule: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]) -> float:
    """How much of the true gradient remains on average over all groups of four, the baseline taken from the group.

    One arm of four succeeds; since it was sampled, the policy has moved to it (w = 5).
    """
    pi, mu, reward = f64(0.5, 0.2, 0.2, 0.1), f64(0.1, 0.3, 0.3, 0.3), f64(1.0, 0.0, 0.0, 0.0)
    score, w = torch.eye(4, dtype=torch.float64) - pi, pi / mu
    true, expected = (mu * w * reward) @ score, torch.zeros(4, dtype=torch.float64)
    for arms in itertools.product(range(4), repeat=4):
        group = torch.tensor(arms)
        baseline = rule(w[group].log(), score[group].norm(dim=1), reward[group])
        assert baseline is not None
        gradient = ((w[group] * (reward[group] - baseline))[:, None] * score[group]).mean(0)
        expected += mu[group].prod() * gradient
    return float(expected @ true / true.square().sum())


def test_a_baseline_from_its_own_group_takes_from_the_gradient_and_the_optimal_one_most() -> None:
    """The mean removes 1/G. The optimum follows the trajectory that dominates w^2 n^2 and removes two thirds."""
    assert _expected_over_groups(lambda w, n, reward: torch.zeros(())) == pytest.approx(1.0)
    assert _expected_over_groups(lambda w, n, reward: reward.mean()) == pytest.approx(0.75)
    assert _expected_over_groups(optimal_baseline) == pytest.approx(0.327, abs=1e-3)
    assert _expected_over_groups(safe_baseline) == pytest.approx(0.75)


def test_a_baseline_from_the_others_leaves_the_expected_gradient_unchanged() -> None:
    assert _expected_over_groups(leave_one_out_baseline) == pytest.approx(1.0, abs=1e-12)


def test_leave_one_out_by_hand() -> None:
    # w^2 n^2 = 4, 9, 16: (9*0 + 16*.5)/25, (4*1 + 16*.5)/20, (4*1 + 9*0)/13
    found = leave_one_out_baseline(f64(2.0, 1.0, 2.0).log(), f64(1.0, 3.0, 2.0), f64(1.0, 0.0, 0.5))
    torch.testing.assert_close(found, f64(8 / 25, 12 / 20, 4 / 13))


def test_safe_leave_one_out_by_hand() -> None:
    # b* of the others is 8/25, 12/20, 4/13 as above; the others' means are .25, .75, .5.
    found = safe_leave_one_out_baseline(f64(2.0, 1.0, 2.0).log(), f64(1.0, 3.0, 2.0), f64(1.0, 0.0, 0.5))
    torch.testing.assert_close(found, f64(0.25, 12 / 20, 4 / 13))


def test_safe_leave_one_out_keeps_the_whole_expected_gradient() -> None:
    assert _expected_over_groups(safe_leave_one_out_baseline) == pytest.approx(1.0, abs=1e-12)


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(1e-3, 1e3), st.floats(-10, 10)), min_size=2, max_size=8),
    st.floats(-10, 10),
)
def test_safe_leave_one_out_does_not_depend_on_the_members_own_numbers(
    rows: list[tuple[float, float, float]], other: float
) -> None:
    columns = [f64(*column) for column in zip(*rows, strict=True)]
    changed = [torch.cat([f64(abs(other) + 1e-3), column[1:]]) for column in columns]
    before, after = safe_leave_one_out_baseline(*columns), safe_leave_one_out_baseline(*changed)
    assert before is not None and after is not None
    torch.testing.assert_close(before[0], after[0], rtol=1e-9, atol=1e-9)


def test_leave_one_out_where_others_have_no_gradient_is_their_mean() -> None:
    reward = f64(1.0, 0.0, 0.5)
    found = leave_one_out_baseline(f64(1.0, 1.0, 1.0).log(), f64(2.0, 0.0, 0.0), reward)
    torch.testing.assert_close(found, f64(0.25, 1.0, 1.0))
    safe = safe_leave_one_out_baseline(f64(1.0, 1.0, 1.0).log(), f64(2.0, 0.0, 0.0), reward)
    torch.testing.assert_close(safe, f64(0.25, 0.75, 0.5))
    for rule in (leave_one_out_baseline, safe_leave_one_out_baseline):
        assert rule(f64(1.0, 1.0, 1.0).log(), f64(0.0, 0.0, 0.0), reward) is None
        with pytest.raises(ValueError, match="at least two"):
            rule(f64(0.0), f64(1.0), f64(1.0))


def test_a_given_rho_base_never_moves() -> None:
    base = RhoBase(0.55)
    assert [base.observe(rho) for rho in (0.1, None, 0.9)] == [0.55] * 3


def test_auto_rho_base_is_the_median_of_five_steps_without_lag_then_fixed() -> None:
    base = RhoBase("auto")
    seen = [base.observe(rho) for rho in (0.9, 0.8, 0.7, 0.95, 0.85, 0.1, 0.1)]
    assert seen[-3:] == [0.85, 0.85, 0.85]


def test_auto_rho_base_learns_nothing_from_lag() -> None:
    """At a constant ESS ratio of 0.2 under lag the rate stays cut; a base of 0.2 would give the full one."""
    base = RhoBase("auto")
    assert [step_scale(0.2, base.observe(None), "ess_sqrt") for _ in range(20)] == [math.sqrt(0.2)] * 20
    assert base.observe(0.9) == 0.9


def test_rho_base_goes_on_after_a_restart_where_it_was() -> None:
    whole, first, second = RhoBase("auto"), RhoBase("auto"), RhoBase("auto")
    rhos = (0.9, 0.8, None, 0.7, 0.95, 0.85, 0.1)
    seen = [whole.observe(rho) for rho in rhos]
    assert [first.observe(rho) for rho in rhos[:3]] == seen[:3]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.observe(rho) for rho in rhos[3:]] == seen[3:]


def test_a_settled_rho_base_survives_a_restart_and_a_number_in_the_config_wins() -> None:
    settled = RhoBase("auto")
    for _ in range(5):
        settled.observe(0.6)
    again, given_by_hand = RhoBase("auto"), RhoBase(0.9)
    again.load_state_dict(settled.state_dict())
    given_by_hand.load_state_dict(settled.state_dict())
    assert again.observe(0.1) == 0.6
    assert given_by_hand.observe(0.1) == 0.9


@pytest.mark.parametrize(("rho", "is_low"), [(0.6, False), (0.3, True)])
def test_rho_base_is_told_once_it_is_settled(caplog: pytest.LogCaptureFixture, rho: float, is_low: bool) -> None:
    base = RhoBase("auto")
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            base.observe(rho)
    first, *more = [record.message for record in caplog.records]
    assert first == f"rho_base is settled at {rho:.3f}, the median of 5 steps"
    assert ["model.dtype: float32" in message for message in more] == [True] * is_low
