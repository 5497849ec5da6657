"""When the ESS guard lowers the lag of admission, and when it raises it again."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.ess_guard import RECOVERY, EssGuard

RATIOS = st.lists(st.one_of(st.none(), st.floats(0, 1), st.just(math.nan)), max_size=200)


def guard(floor: float | None = 0.3) -> EssGuard:
    return EssGuard(max_lag=2, floor=floor, num_steps=2)


def test_lag_shrinks_by_one_after_enough_low_steps_in_a_row_and_stops_at_zero() -> None:
    one = guard()
    assert [one.observe(0.1) for _ in range(8)] == [2, 1, 1, 0, 0, 0, 0, 0]


def test_a_good_step_between_starts_the_count_again() -> None:
    one = guard()
    assert [one.observe(ratio) for ratio in (0.1, 0.9, 0.1, 0.9, 0.1, 0.1)] == [2, 2, 2, 2, 2, 1]


def test_a_fraction_of_lag_is_given_up_last_and_comes_back() -> None:
    one = EssGuard(max_lag=1.5, floor=0.3, num_steps=1)
    assert [one.observe(0.1) for _ in range(3)] == [0.5, 0, 0]
    assert [one.observe(0.9) for _ in range(2 * RECOVERY)][RECOVERY - 1 :: RECOVERY] == [1, 1.5]


def test_lag_comes_back_slowly() -> None:
    one = guard()
    for _ in range(4):
        one.observe(0.1)
    lags = [one.observe(0.9) for _ in range(2 * RECOVERY * 2)]
    assert lags.index(1) + 1 == RECOVERY * 2
    assert lags.index(2) + 1 == 2 * RECOVERY * 2


@pytest.mark.parametrize("unmeasured", [None, math.nan])
def test_what_cannot_be_measured_counts_as_low(unmeasured: float | None) -> None:
    one = guard()
    assert [one.observe(unmeasured) for _ in range(2)] == [2, 1]


@given(RATIOS)
def test_without_a_floor_nothing_changes(ratios: list[float | None]) -> None:
    one = guard(floor=None)
    assert all(one.observe(ratio) == 2 for ratio in ratios)


@given(RATIOS)
def test_lag_stays_in_range_and_moves_by_at_most_one(ratios: list[float | None]) -> None:
    one = guard()
    lags = [2, *(one.observe(ratio) for ratio in ratios)]
    assert all(0 <= lag <= 2 and abs(lag - before) <= 1 for before, lag in itertools.pairwise(lags))


@given(RATIOS, RATIOS)
def test_after_a_restart_it_goes_on_where_it_was(before: list[float | None], after: list[float | None]) -> None:
    whole, first, second = guard(), guard(), guard()
    for ratio in before:
        assert whole.observe(ratio) == first.observe(ratio)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.lag == first.lag
    assert [second.observe(ratio) for ratio in after] == [whole.observe(ratio) for ratio in after]


def test_after_a_restart_the_config_wins() -> None:
    state = guard().state_dict()
    smaller, without = EssGuard(max_lag=1, floor=0.3, num_steps=2), EssGuard(max_lag=3, floor=None, num_steps=2)
    smaller.load_state_dict(state)
    without.load_state_dict(state)
    assert (smaller.lag, without.lag) == (1, 3)
