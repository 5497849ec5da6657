"""The two sums against plain ones, whatever the order of pieces and of their weights."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.gradient.score_sums import GradientSums, Recorder, dots, total_norm

RATIOS, SCORES = [0.0, 0.6, -0.4, 0.6], [0.0, 0.5, 2.0]
Event = tuple[str, int, float, float]
events = st.lists(
    st.tuples(
        st.sampled_from(["whole", "rows", "weighted", "close"]),
        st.integers(0, 9),
        st.sampled_from(RATIOS),
        st.sampled_from(SCORES),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_two_sums_are_those_added_up_one_by_one(happened: list[Event]) -> None:
    sums = GradientSums([nn.Parameter(torch.zeros(4))], has_scores=True)
    sums.reset()
    total, scores = torch.zeros(2, 4)
    for kind, seed, ratio, score in happened:
        piece = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        coefficient = ratio * score if score else ratio
        if kind == "close":
            total -= ratio * scores
            scores = torch.zeros(4)
            sums.close_group(ratio)
            continue
        if kind == "whole":
            sums.add(0, piece, coefficient=coefficient, score=score)
        elif kind == "rows":
            piece[[0, 2]] = 0
            sums.add_rows(0, torch.tensor([1, 3]), piece[[1, 3]], coefficient=coefficient, score=score)
        else:
            sums.add_weighted(0, piece[None], coefficient_n=[coefficient], score_n=[score])
        total += coefficient * piece
        scores += score * piece
    sums.close_group(0.0)
    torch.testing.assert_close(sums.total[0], total, rtol=1e-5, atol=1e-5)


def test_members_of_equal_reward_are_written_into_one_sum_only() -> None:
    """The total is touched when the ratio changes, and when the group closes."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    sums = GradientSums([parameter], has_scores=True)
    sums.reset()
    versions = [sums.total[0]._version]
    for ratio in (0.6, 0.6, 0.6, -0.4, -0.4):
        sums.add(0, torch.ones(4, 3), coefficient=ratio * 2.0, score=2.0)
        versions.append(sums.total[0]._version)
    sums.close_group(0.0)
    assert [after - before for before, after in pairwise(versions)] == [0, 0, 0, 1, 0]
    torch.testing.assert_close(sums.total[0], torch.full((4, 3), 2.0))


def test_what_is_not_finite_reaches_the_total_and_the_next_step_is_clean() -> None:
    sums = GradientSums([nn.Parameter(torch.zeros(2, 2))], has_scores=True)
    sums.reset()
    sums.add(0, torch.full((2, 2), torch.inf), coefficient=0.5, score=1.0)
    sums.close_group(0.1)
    assert not bool(sums.total[0].isfinite().any())
    sums.reset()
    sums.add(0, torch.ones(2, 2), coefficient=0.5, score=1.0)
    sums.close_group(0.1)
    torch.testing.assert_close(sums.total[0], torch.full((2, 2), 0.4))


def test_norms_of_large_weights_are_exact() -> None:
    """|G^T X|^2 = sum (G G^T) * (X X^T), in float64 and without the 17 million elements of the piece."""
    generator = torch.Generator().manual_seed(0)
    grad_SO, input_SI = (torch.randn(2, 4096, generator=generator) for _ in range(2))
    weight = nn.Parameter(torch.zeros(4096, 4096))
    sums = GradientSums([weight], has_scores=False)
    sums.reset()
    recorder = Recorder(
        sums, bounds=(0, 2), action_bounds=(0, 2), has_norms=True, tied_weight=None, device=torch.device("cpu")
    )
    recorder.linear(weight, grad_SO, input_SI)
    left, right = grad_SO.double(), input_SI.double()
    exact = float(((left @ left.t()) * (right @ right.t())).sum())
    assert abs(float(recorder.norm2_n[0]) / exact - 1) < 2e-6
    assert abs(float(total_norm(sums.total)) / exact**0.5 - 1) < 2e-6


def test_products_of_large_tensors_are_exact() -> None:
    ones = torch.ones(20_000_000)
    assert sum(map(float, dots(ones, 3 * ones))) == 60_000_000


def test_nothing_has_no_norm_and_what_is_not_finite_has_none_that_is() -> None:
    assert float(total_norm([])) == 0.0
    assert not bool(total_norm([torch.ones(3), torch.tensor([1.0, torch.inf])]).isfinite())
    assert not bool(total_norm([torch.tensor([torch.nan])]).isfinite())
