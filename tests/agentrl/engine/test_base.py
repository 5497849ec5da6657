"""Parity and weight versions against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from agentrl.engine.base import parity


def test_distances_are_those_worked_by_hand() -> None:
    found = parity([-1.0, -2.0], [-1.5, -2.0])
    assert found.max_abs == 0.5
    assert found.mean_abs == 0.25
    assert found.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_broken_logprob_is_infinitely_far(broken: float) -> None:
    assert parity([-1.0, broken], [-1.0, -1.0]).max_abs == math.inf
    assert parity([-1.0, -1.0], [-1.0, broken]).kl == math.inf


@pytest.mark.parametrize(("engine", "learner"), [([], []), ([-1.0], [-1.0, -2.0])])
def test_records_that_do_not_match_are_refused(engine: list[float], learner: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        parity(engine, learner)


def test_a_learner_far_above_the_engine_overflows_to_infinity() -> None:
    assert parity([-1000.0], [0.0]).kl == math.inf
