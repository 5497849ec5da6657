"""Difficulty-aware task choice: the value of a task by hand, how often each is asked, and that none starves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.source import SolveRates

GROUP = 8
REWARDS = st.lists(st.floats(-2, 2), min_size=1, max_size=64)


def rates_after(*groups: Sequence[float]) -> SolveRates:
    rates = SolveRates()
    for rewards in groups:
        rates.observe("t", rewards)
    return rates


@pytest.mark.parametrize(
    ("groups", "worth"),
    [
        ([], 4 * 1 / (2 * 3)),
        ([[1.0, 1.0, 0.0, 0.0]], 4 * 9 / (6 * 7)),
        ([[0.0] * 4], 4 * 5 / (6 * 7)),
        ([[1.0] * 4], 4 * 5 / (6 * 7)),
        ([[1.0] * 4, [0.0] * 4], 4 * 3 * 5 / (8 * 9)),  # the older group counts half
        ([[0.5, 0.5]], 4 * 4 / (4 * 5)),  # rewards between 0 and 1 count by what they are
    ],
)
def test_worth_is_four_times_the_expected_variance_of_the_reward(groups: list[list[float]], worth: float) -> None:
    assert rates_after(*groups).worth("t") == pytest.approx(worth)


def test_one_half_is_worth_most_and_both_ends_are_worth_least() -> None:
    worth = [rates_after([1.0] * solved + [0.0] * (GROUP - solved)).worth("t") for solved in range(GROUP + 1)]
    assert worth[:5] == sorted(worth[:5])
    assert worth[4:] == sorted(worth[4:], reverse=True)


def test_a_task_never_seen_is_worth_more_than_a_hopeless_one_and_less_than_one_at_one_half() -> None:
    rates = rates_after([1.0] * 4 + [0.0] * 4)
    rates.observe("hopeless", [0.0] * 8)
    assert rates.worth("hopeless") < rates.worth("unseen") < rates.worth("t")


@given(groups=st.lists(REWARDS, max_size=20))
def test_no_task_is_ever_worth_nothing(groups: list[list[float]]) -> None:
    largest = max((len(rewards) for rewards in groups), default=1)
    assert 1 / (largest / 2 + 1.2) <= rates_after(*groups).worth("t") <= 1


def test_a_task_that_was_learned_is_found_out_within_a_few_groups() -> None:
    """Old counts fade: years of failure do not outweigh three groups of half."""
    rates = rates_after(*[[0.0] * GROUP] * 50, *[[1.0, 0.0] * (GROUP // 2)] * 3)
    assert rates.worth("t") > 0.8


@pytest.mark.parametrize("worth_of", ["half", "never"])
def test_rows_are_asked_as_often_as_they_are_worth(worth_of: str) -> None:
    rates = SolveRates()
    rates.observe("half", [0.0, 1.0] * 4)
    rates.observe("never", [0.0] * 8)
    asked = sum(rates.is_played(worth_of, place=place, seed=3) for place in range(4000))
    assert asked / 4000 == pytest.approx(rates.worth(worth_of), abs=0.03)


def test_most_of_what_is_played_can_be_learned_from_and_every_task_comes_again() -> None:
    """200 tasks of which a fifth is near one half, played epoch after epoch with true solve rates."""
    truth = {f"{i}": (0.5 if i % 5 == 0 else float(i % 2)) for i in range(200)}
    rng, rates, asked = random.Random(0), SolveRates(), Counter[str]()
    for place in range(20 * len(truth)):
        task_id = str(place % len(truth))
        if rates.is_played(task_id, place=place, seed=0):
            rates.observe(task_id, [float(rng.random() < truth[task_id]) for _ in range(GROUP)])
            asked[task_id] += place >= 2 * len(truth)
    useful = sum(asked[task_id] for task_id, p in truth.items() if p == 0.5)
    assert useful / asked.total() > 0.45  # 0.2 of the rows
    assert len(+asked) == len(truth)
