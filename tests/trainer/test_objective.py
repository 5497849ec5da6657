"""Ratios, truncation, plain baselines and the KL estimate, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trainer import objective


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sequence_log_weight_sums_in_float64() -> None:
    logprob_N = torch.full((100_000,), -0.1)
    behavior_N = torch.full((100_000,), -0.2, dtype=torch.float64)
    expected = 100_000 * (float(torch.tensor(-0.1)) + 0.2)
    assert objective.sequence_log_weight(logprob_N, behavior_N).item() == pytest.approx(expected, rel=1e-12)


def test_no_action_tokens_weigh_one() -> None:
    assert objective.sequence_log_weight(f64(), f64()).item() == 0.0


@pytest.mark.parametrize(("log_weight", "expected"), [(1e4, 8.0), (math.log(9), 8.0), (math.log(7), 7.0), (-1e4, 0.0)])
def test_truncation_never_overflows(log_weight: float, expected: float) -> None:
    assert objective.truncated_log_weight(f64(log_weight), 8.0).exp().item() == pytest.approx(expected)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    torch.testing.assert_close(objective.leave_one_out_baseline(f64(1.0, 0.0, 0.5)), f64(0.25, 0.75, 0.5))


def test_leave_one_out_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="two"):
        objective.leave_one_out_baseline(f64(1.0))


def test_spread() -> None:
    assert objective.has_spread(f64(1.0, 1.0, 0.0))
    assert not objective.has_spread(f64(0.3, 0.3, 0.3))
    assert not objective.has_spread(f64(1.0))


def test_behavior_kl_is_zero_on_policy_and_matches_the_exact_divergence_in_expectation() -> None:
    mu, pi = f64(0.5, 0.3, 0.2), f64(0.2, 0.5, 0.3)
    assert objective.behavior_kl(f64(0.0)).item() == 0.0
    estimate = (mu * objective.behavior_kl((pi / mu).log())).sum()
    torch.testing.assert_close(estimate, (mu * (mu / pi).log()).sum())


def test_behavior_kl_stays_finite() -> None:
    assert torch.isfinite(objective.behavior_kl(f64(1e4, -1e4))).all()
