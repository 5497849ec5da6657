"""The table's arithmetic on gradients whose expectations are known."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.baseline_bias import Sample


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(sample: Sample, rule: str) -> list[str]:
    return next(cells[2:] for cells in sample.rows("x") if cells[1] == rule)


@pytest.fixture
def sample() -> Sample:
    """Four groups alike but for the scale of their scores: one success of weight 8 among four, all norms equal."""
    found = Sample()
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    for scale in (1, 1, 2, 2):
        found.add(f64(math.log(8), 0.0, 0.0, 0.0), scale * scores, f64(1.0, 0.0, 0.0, 0.0))
    return found


def test_without_a_baseline_all_is_kept_and_nothing_is_pushed_down(sample: Sample) -> None:
    kept, cosine, *_, down = row(sample, "none")[:5]
    assert (kept, cosine, down) == ("1.00", "1.00", "0.00")


def test_the_mean_keeps_one_less_the_reward_mean(sample: Sample) -> None:
    # Gradients (8, 0)/4 and (6, -3/4)/4: 6/8 is kept; pushed down 3 * 1/4 for 6.
    kept, cosine, *_, down = row(sample, "mean")[:5]
    assert (kept, cosine) == ("0.75", f"{6 / math.hypot(6, 0.75):.2f}")
    assert float(down) == pytest.approx(0.75 / 6, abs=0.006)


def test_the_optimum_gives_the_gradient_away_and_the_safe_one_does_not(sample: Sample) -> None:
    # b* = 64/67: 8 * 3/67 of 8 is kept.
    assert row(sample, "opob")[0] == f"{3 / 67:.2f}"
    assert row(sample, "opob")[-2:] == ["100%", f"{64 / 67 - 0.25:.2f}"]
    assert row(sample, "opob_safe")[:5] == row(sample, "mean")[:5]
