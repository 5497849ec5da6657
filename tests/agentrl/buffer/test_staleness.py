"""The staleness rule with numbers worked by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.buffer.staleness import StalenessRule
from agentrl.errors import StaleTrajectoryError

RULE = StalenessRule(groups_per_step=2, max_lag=1)


@pytest.mark.parametrize(("lag", "slots"), [(None, 4), (1, 4), (0, 2)])
def test_there_are_slots_for_every_version_that_may_be_outstanding(lag: int | None, slots: int) -> None:
    assert RULE.num_slots(lag) == slots


@pytest.mark.parametrize(
    ("groups_per_step", "max_lag", "slots", "bound", "oldest"),
    [(8, 0.5, 12, 1, 4), (8, 2, 24, 2, 8), (10, 0.3, 13, 1, 3), (8, 1.3, 18, 2, 2), (8, 0, 8, 0, 8)],
)
def test_a_fraction_of_lag_is_a_share_of_the_batch(
    groups_per_step: int, max_lag: float, slots: int, bound: int, oldest: int
) -> None:
    rule = StalenessRule(groups_per_step=groups_per_step, max_lag=max_lag)
    assert (rule.num_slots(), rule.bound, rule.num_oldest) == (slots, bound, oldest)
    assert rule.num_slots() - groups_per_step == groups_per_step * int(max_lag) + oldest % groups_per_step


def test_of_a_fraction_the_last_batch_has_few_places_for_the_oldest() -> None:
    rule = StalenessRule(groups_per_step=4, max_lag=1.5)  # two batches after this one; two places in the second
    assert not rule.would_strand(Counter({5: 6}), Counter(), version=5)
    assert rule.would_strand(Counter({5: 7}), Counter(), version=5)
    assert rule.would_strand(Counter({5: 1}), Counter({4: 2, 5: 4}), version=5)
    assert not rule.would_strand(Counter({4: 2}), Counter({5: 4}), version=5)
    assert rule.would_strand(Counter({4: 1}), Counter({4: 2}), version=5)


@pytest.mark.parametrize(("oversample", "slots"), [(1, 2), (1.2, 3), (2, 4)])
def test_without_lag_more_groups_may_be_played_than_a_step_consumes(oversample: float, slots: int) -> None:
    rule = StalenessRule(groups_per_step=2, max_lag=0, on_stale="finish", oversample=oversample)
    assert rule.num_slots() == slots


def test_what_is_finished_whatever_its_age_is_never_stale() -> None:
    rule = StalenessRule(groups_per_step=2, max_lag=0, on_stale="finish")
    rule.check(7, 0, version=500)
    assert rule.largest_lag is None and rule.num_slots() == 2


@pytest.mark.parametrize("lag", [-1, 2])
def test_a_lag_outside_the_bound_is_refused(lag: int) -> None:
    with pytest.raises(ValueError, match=rf"lag {lag} is outside \[0, 1\]"):
        RULE.num_slots(lag)


def test_the_bound_itself_is_allowed_and_one_more_is_not() -> None:
    RULE.check(7, 4, version=5)
    with pytest.raises(StaleTrajectoryError, match="group 7 has lag 2, allowed is 1"):
        RULE.check(7, 3, version=5)


@pytest.mark.parametrize(
    ("in_flight", "ready", "strands"),
    [
        # After the batch taken now at version 5, groups of version 5 have two batches of two left, those of version 4
        # have one, those of version 3 none.
        ({}, {3: 3}, False),  # nothing in flight: nothing to wait for
        ({3: 1}, {}, True),
        ({4: 2}, {}, False),
        ({4: 2}, {4: 1}, True),  # three groups for two places
        ({5: 4}, {}, False),
        ({5: 5}, {}, True),
        ({5: 1}, {4: 2}, False),  # the two older ones take the first of the two batches
        ({5: 1}, {4: 4}, True),
        ({4: 1}, {5: 3}, False),
        ({4: 1}, {5: 4}, True),
    ],
)
def test_groups_in_flight_are_stranded_when_others_fill_their_last_batches(
    in_flight: dict[int, int], ready: dict[int, int], strands: bool
) -> None:
    rule = StalenessRule(groups_per_step=2, max_lag=2)
    assert rule.would_strand(Counter(in_flight), Counter(ready), version=5) is strands
