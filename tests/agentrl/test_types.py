"""Rewards that are equal, and those that only round differently."""

from __future__ import annotations

import math

import pytest

from agentrl.types import has_spread


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((), False),
        ((1.0,), False),
        ((0.3, 0.3, 0.3), False),
        ((0.1 + 0.2, 0.3, 0.3, 0.3), False),
        ((1e6 + 1e-9, 1e6), False),
        ((-1.0, -1.0 - 1e-12), False),
        ((1.0, 1.0, 0.0), True),
        ((0.3, 0.3 + 1e-6), True),
        ((1e6, 1e6 + 1), True),
        ((0.0, math.nan), True),
        ((math.nan, 0.0), True),
        ((0.0, math.inf), True),
        ((math.nan,), False),
    ],
)
def test_rewards_have_spread_where_they_differ_by_more_than_rounding(
    rewards: tuple[float, ...], expected: bool
) -> None:
    assert has_spread(rewards) is expected
