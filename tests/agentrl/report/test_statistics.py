import math
import random
from dataclasses import replace

import pytest

from agentrl.report.statistics import avg_at_n, has_spread, pass_at_k, summarize
from agentrl.testing import episode_of, with_members
from tests.agentrl.report.synthetic_run import Words, make_group


def test_avg_at_n_is_the_mean_over_tasks_of_a_tasks_share() -> None:
    correct = [[True, True, False, False], [True, False, False, False], [False] * 4]
    assert avg_at_n(correct).value == pytest.approx((0.5 + 0.25 + 0.0) / 3)


def test_a_task_with_fewer_samples_weighs_as_much_as_another() -> None:
    assert avg_at_n([[True], [False, False, False]]).value == 0.5


def test_pass_at_k_by_hand() -> None:
    """n=4: c=2 gives 1 - C(2,2)/C(4,2) = 5/6; c=1 gives 1 - C(3,2)/C(4,2) = 1/2; c=0 gives 0."""
    correct = [[True, True, False, False], [True, False, False, False], [False] * 4]
    assert pass_at_k(correct, 2).value == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)


def test_pass_at_1_is_avg_and_pass_at_n_is_any() -> None:
    correct = [[True, False, False], [False] * 3, [True] * 3]
    assert pass_at_k(correct, 1) == pytest.approx(avg_at_n(correct))
    assert pass_at_k(correct, 3).value == pytest.approx(2 / 3)


def test_the_interval_of_one_sample_a_task_matches_the_binomial() -> None:
    """100 tasks, half solved: standard error sqrt(.25/100) = .05, so the interval is close to .5 +- 1.96 * .05."""
    estimate = avg_at_n([[i % 2 == 0] for i in range(100)])
    assert (estimate.low, estimate.high) == (pytest.approx(0.402, abs=0.015), pytest.approx(0.598, abs=0.015))


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval() -> None:
    few = avg_at_n([[i % 2 == 0] for i in range(40)])
    many = avg_at_n([[i % 2 == 0] * 64 for i in range(40)])
    assert few == many


@pytest.mark.parametrize("solved", [False, True])
def test_unanimous_tasks_do_not_claim_certainty(solved: bool) -> None:
    """0 of 30: the exact bound is 1 - 0.025^(1/30) = 0.1157."""
    estimate = avg_at_n([[solved] * 4] * 30)
    assert estimate.high - estimate.low == pytest.approx(0.1157, abs=1e-4)


def test_an_interval_is_the_same_for_the_same_seed() -> None:
    correct = [[random.Random(i).random() < 0.3] * 2 for i in range(20)]
    assert avg_at_n(correct, seed=1) == avg_at_n(correct, seed=1)


@pytest.mark.parametrize("correct", [[], [[]], [[True], []]])
def test_nothing_measured_is_an_error(correct: list[list[bool]]) -> None:
    with pytest.raises(ValueError):
        avg_at_n(correct)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_refuses_a_k_it_cannot_estimate(k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k([[True, False]], k)


def test_summarize_counts_what_the_groups_hold() -> None:
    rng, words = random.Random(0), Words()
    groups = [make_group(words, i, version=5, skill=skill, rng=rng, size=6) for i, skill in enumerate((0.0, 1.0))]
    result = summarize(groups, policy_version=5)
    assert (result.num_tasks, result.n, result.avg) == (2, 6, 0.5)
    assert list(result.pass_at) == [1, 2, 4, 6]
    assert sum(result.stop_reasons.values()) == 12
    assert result.metrics()["eval/pass_at_n"] == 0.5
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    assert result.turns_mean == pytest.approx(sum(len(episode.turns) for episode in episodes) / 12)


def test_an_episode_of_several_segments_is_one_sample() -> None:
    whole = make_group(Words(), 1, version=0, skill=0.5, rng=random.Random(1), size=2)
    first, second = whole.trajectories
    segments = [replace(first, id=f"{first.id}.{i}") for i in range(3)]
    forked = with_members(whole, [episode_of(*segments), second])
    once, thrice = summarize([whole], policy_version=0), summarize([forked], policy_version=0)
    assert thrice.n == once.n == 2
    assert thrice.avg == once.avg
    assert thrice.turns_mean == (3 * len(first.turns) + len(second.turns)) / 2


def test_an_episode_without_a_token_record_counts_what_its_endpoint_told() -> None:
    group = make_group(Words(), 1, version=0, skill=0.5, rng=random.Random(1), size=2)
    told = tuple(replace(t, turns=(), info={"turns": 4.0, "completion_tokens": 70.0}) for t in group.trajectories)
    result = summarize([with_members(group, told)], policy_version=0)
    assert (result.turns_mean, result.response_tokens_mean) == (4.0, 70.0)


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
