"""The two sums against plain ones, for any order of pieces and weights."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.gradient.sums import GradientSums

RATIOS, SCORES = [0.0, 0.6, -0.4, 0.6], [0.0, 0.5, 2.0]
Event = tuple[str, int, float, float]
events = st.lists(
    st.tuples(
        st.sampled_from(["whole", "product", "rows", "weighted", "close"]),
        st.integers(0, 9),
        st.sampled_from(RATIOS),
        st.sampled_from(SCORES),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_two_sums_are_those_added_up_one_by_one(happened: list[Event]) -> None:
    """Of a matrix [4, 1], and of a vector [4], which gets what is `weighted`."""
    sums = GradientSums([nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(4))], has_scores=True)
    sums.reset()
    total, scores = torch.zeros(2, 2, 4)
    for kind, seed, ratio, score in happened:
        piece = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        if kind == "close":
            total -= ratio * scores
            scores = torch.zeros(2, 4)
            sums.close_group(ratio)
            continue
        weight_2 = torch.tensor([[ratio * score], [score]])
        if kind == "whole":
            sums.add(0, piece[:, None], ratio=ratio, score=score)
        elif kind == "product":
            sums.add_product(0, piece[None], torch.ones(1, 1), ratio=ratio, score=score)
        elif kind == "rows":  # a row may be named several times
            piece[[0, 2]] = 0
            rows_3 = torch.tensor([1, 3, 1])
            halves_31 = piece[rows_3, None] * torch.tensor([[0.5], [1.0], [0.5]])
            sums.add_rows(0, rows_3, halves_31, weight_2.expand(2, 3))
        else:
            sums.add_weighted(1, piece[None], weight_2)
        total[int(kind == "weighted")] += ratio * score * piece
        scores[int(kind == "weighted")] += score * piece
    sums.close_group(0.0)
    for ours, theirs in zip(sums.total, total, strict=True):
        torch.testing.assert_close(ours.flatten(), theirs, rtol=1e-5, atol=1e-5)


def test_members_of_equal_reward_are_written_into_one_sum_only() -> None:
    """The total is written only when the ratio changes and when the group closes."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    sums = GradientSums([parameter], has_scores=True)
    sums.reset()
    versions = [sums.total[0]._version]
    for ratio in (0.6, 0.6, 0.6, -0.4, -0.4):
        sums.add(0, torch.ones(4, 3), ratio=ratio, score=2.0)
        versions.append(sums.total[0]._version)
    sums.close_group(0.0)
    assert [after - before for before, after in pairwise(versions)] == [0, 0, 0, 1, 0]
    torch.testing.assert_close(sums.total[0], torch.full((4, 3), 2.0))


def test_what_is_not_finite_reaches_the_total_and_the_next_step_is_clean() -> None:
    sums = GradientSums([nn.Parameter(torch.zeros(2, 2))], has_scores=True)
    sums.reset()
    sums.add(0, torch.full((2, 2), torch.inf), ratio=0.5, score=1.0)
    sums.close_group(0.1)
    assert not bool(sums.total[0].isfinite().any())
    sums.reset()
    sums.add(0, torch.ones(2, 2), ratio=0.5, score=1.0)
    sums.close_group(0.1)
    torch.testing.assert_close(sums.total[0], torch.full((2, 2), 0.4))
