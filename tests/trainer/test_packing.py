"""Packs contain every action token once; plans keep the budget; ranks share whole groups evenly."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import LearnerError
from agentrl.testing import completion, group, trajectory
from agentrl.types import Batch, Trajectory, Turn, VersionSpan
from tests.trainer.trainer_builders import episode, mixed_groups
from trainer.packing import action_tensors, join, num_tokens, plan, share_of_rank, without_older_tokens

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 200), max_size=40)
SHAPES = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3), min_size=1, max_size=6
)


@given(LENGTHS, st.integers(1, 300))
def test_every_trajectory_lies_in_exactly_one_pack(lengths: list[int], budget: int) -> None:
    assert sorted(index for pack in plan(lengths, budget) for index in pack) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 300))
def test_only_a_trajectory_that_exceeds_the_budget_alone_has_a_pack_beyond_it(lengths: list[int], budget: int) -> None:
    for pack in plan(lengths, budget):
        assert pack and (len(pack) == 1 or sum(lengths[index] for index in pack) <= budget)


@given(LENGTHS, st.integers(1, 300))
def test_no_two_packs_fit_into_one(lengths: list[int], budget: int) -> None:
    loads = sorted(sum(lengths[index] for index in pack) for pack in plan(lengths, budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def spans(*pairs: tuple[int, int]) -> tuple[VersionSpan, ...]:
    """(version, number of tokens) of each."""
    ends = [sum(count for _, count in pairs[: at + 1]) for at in range(len(pairs))]
    return tuple(VersionSpan(version=v, start=end - n, end=end) for (v, n), end in zip(pairs, ends, strict=True))


def partial_episode(old_logprob: float) -> Trajectory:
    """Two turns; version 3 sampled the second, and the last token of the first."""
    first = replace(
        completion((11, 12, 13), (old_logprob, old_logprob, -0.3), 2), version_spans=spans((1, 1), (2, 1), (3, 1))
    )
    turns = [
        Turn(observation_ids=(1, 2), completion=first),
        Turn(observation_ids=(4,), completion=completion((14, 15), (-0.4, -0.5), 3)),
    ]
    return trajectory("partial", turns, reward=1.0)


def test_tokens_of_older_weights_are_read_and_not_trained() -> None:
    whole, old = partial_episode(-0.1), trajectory("old", [partial_episode(-0.1).turns[0]], reward=0.0)
    masked = without_older_tokens(Batch(policy_version=3, max_lag=None, groups=(group(0, [whole, old]),)))
    one, other = masked.trajectories()
    assert one.token_ids() == whole.token_ids() and one.num_action_tokens == 3 and one.policy_version == 3
    tensors = action_tensors(one, CPU)
    assert tensors.target_N.tolist() == [13, 14, 15] and tensors.predictor_N.tolist() == [3, 5, 6]
    assert tensors.behavior_logprob_N.tolist() == [-0.3, -0.4, -0.5]
    assert other.action_mask() == [0, 0, 0, 0, 1]
    later = without_older_tokens(Batch(policy_version=4, max_lag=None, groups=(group(0, [whole]),))).trajectories()[0]
    assert later.num_action_tokens == 0 and later.token_ids() == whole.token_ids()


def test_nothing_of_a_masked_batch_depends_on_the_old_logprobs() -> None:
    batches = [
        without_older_tokens(Batch(policy_version=3, max_lag=None, groups=(group(0, [partial_episode(old)]),)))
        for old in (-0.1, -7.0)
    ]
    assert batches[0] == batches[1]


def test_packs_are_evened_out() -> None:
    assert [sum((60, 60, 30, 30, 10, 10)[i] for i in pack) for pack in plan((60, 60, 30, 30, 10, 10), 140)] == [
        100,
        100,
    ]


@settings(max_examples=30)
@given(SHAPES)
def test_a_pack_holds_every_action_token_once_and_nothing_else(shapes: list[list[tuple[int, int]]]) -> None:
    episodes = [episode(str(i), reward=0.0, shape=tuple(shape), seed=i) for i, shape in enumerate(shapes)]
    members = [action_tensors(one, CPU) for one in episodes]
    pack = join(members)
    expected = [t for e in episodes for t, acted in zip(e.token_ids(), e.action_mask(), strict=True) if acted]
    assert pack.target_N.tolist() == expected
    for segment, (one, (start, end)) in enumerate(zip(episodes, pairwise(pack.bounds), strict=True)):
        ids, positions = one.token_ids(), pack.per_segment(pack.predictor_N)[segment] - start
        assert pack.input_ids_S[start:end].tolist() == ids[: end - start]
        assert pack.position_ids_S[start:end].tolist() == list(range(end - start))
        assert [ids[p + 1] for p in positions] == pack.per_segment(pack.target_N)[segment].tolist()


def test_what_follows_the_last_action_is_not_read() -> None:
    tail = Turn(observation_ids=(7, 8, 9), completion=completion((), (), 0))
    one = trajectory(
        "a", [Turn(observation_ids=(1, 2), completion=completion((3, 4), (-1.0, -2.0), 5)), tail], reward=0
    )
    tensors = action_tensors(one, CPU)
    assert (tensors.input_ids_S.tolist(), tensors.predictor_N.tolist()) == ([1, 2, 3], [1, 2])
    assert tensors.behavior_logprob_N.tolist() == [-1.0, -2.0] and tensors.policy_version_N.tolist() == [5, 5]


def test_an_episode_without_a_prompt_is_refused() -> None:
    headless = trajectory("headless", [Turn(observation_ids=(), completion=completion((1,), (-1.0,), 0))], reward=0.0)
    with pytest.raises(LearnerError, match="headless"):
        action_tensors(headless, CPU)


def test_every_group_goes_to_exactly_one_rank_and_loads_are_even() -> None:
    groups = [group(i, [episode("a", reward=0.0, shape=((n, n),))]) for i, n in enumerate((40, 10, 10, 10, 10))]
    shares = [share_of_rank(groups, rank=rank, num_ranks=2) for rank in range(2)]
    assert sorted(g.group_id for share in shares for g in share) == [0, 1, 2, 3, 4]
    assert [sum(map(num_tokens, share)) for share in shares] == [80, 80]


def test_the_split_does_not_depend_on_the_order_of_groups(tiny_model: Any) -> None:
    groups = mixed_groups(tiny_model)
    assert share_of_rank(groups, rank=1, num_ranks=2) == share_of_rank(groups[::-1], rank=1, num_ranks=2)
