"""Credit by turn: rewards to go and their weights by hand, and exact expectations over every group of a small task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.testing import episode_of, with_members
from benchmarks.turn_credit import STOP, WAIT, WORK, AliveMean, episode, moments, paths, policy, true_gradient
from tests.trainer.objective.test_interface import autograd_of, estimated, relative_error
from tests.trainer.trainer_builders import mixed_groups
from trainer.objective.interface import Group, Member, Turns
from trainer.objective.registry import make_objective
from trainer.objective.turn_credit import TurnCredit, leave_one_out_by_turn, turns_of

PI, MU = policy(0), policy(0) + 0.5 * policy(1)
RLOO = AlgorithmConfig(preset="rloo", credit="turn", ratio="sequence")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def path_of(*actions: int) -> Any:
    return next(path for path in paths() if path.actions == actions)


def test_rewards_of_turns_add_up_to_the_episode_s_and_score_comes_last() -> None:
    """Two turns of work, one that stops: 0.25, 0.25, and 1 from `score`. Then the same in two segments."""
    whole = episode(path_of(WORK, WORK, STOP), PI)
    (found,) = turns_of([whole])
    assert found.reward_K.tolist() == [0.25, 0.25, 1.0] and found.num_actions_K.tolist() == [1, 1, 1]
    first, second = replace(whole, turns=whole.turns[:1]), replace(whole, turns=whole.turns[1:])
    assert [one.reward_K.tolist() for one in turns_of([first, second])] == [[1.5], [0.25, 1.0]]


def group_of(*members: Any) -> Group:
    return Group(
        reward_E=f64(*(path.reward for path in members)),
        num_actions_E=torch.tensor([len(path.actions) for path in members]),
        episodes=tuple((episode(path, PI),) for path in members),
    )


def test_each_turn_s_advantage_by_hand() -> None:
    """To go: 1.5, 1.25, 1 and 0.75, 0.5 and 0.5, 0.25, 0."""
    group = group_of(path_of(WORK, WORK, STOP), path_of(WORK, STOP), path_of(WORK, WORK, WAIT))
    first, second, third = make_objective(RLOO).advantages(group)  # type: ignore[misc]
    assert first.tolist() == pytest.approx([1.5 - 0.625, 1.25 - 0.375, 1.0 - 0.25])
    assert second.tolist() == pytest.approx([0.75 - 1.0, 0.5 - 0.75])
    assert third.tolist() == pytest.approx([0.5 - 1.125, 0.25 - 0.875, 0.0 - 0.75])


def test_another_that_has_ended_counts_with_its_last_turn() -> None:
    longest, *others = leave_one_out_by_turn([f64(3, 2, 1), f64(5), f64(7, 4)])
    assert longest.tolist() == [6.0, 4.5, 4.5]
    assert [one.tolist() for one in others] == [[5.0], [4.0, 3.5]]
    assert [one.tolist() for one in leave_one_out_by_turn([f64(), f64(1, 2)])] == [[], [0.0, 0.0]]
    with pytest.raises(ValueError, match="at least two"):
        leave_one_out_by_turn([f64(1)])


def test_without_rewards_of_turns_it_is_credit_by_episode() -> None:
    members = [replace(path_of(*actions), turn_rewards=(0.0,) * len(actions)) for actions in ((STOP,), (WORK, STOP))]
    group = group_of(*members, replace(path_of(WORK, WORK, STOP), turn_rewards=(0.0,) * 3))
    by_episode = make_objective(AlgorithmConfig(preset="rloo")).advantages(group)
    by_turn = make_objective(RLOO).advantages(group)
    assert by_episode is not None and by_turn is not None
    for whole, each_N in zip(by_episode, by_turn, strict=True):
        torch.testing.assert_close(each_N, whole.expand_as(each_N))


def test_a_reward_has_the_ratio_up_to_its_turn_by_hand() -> None:
    """Turns of 2, 0 and 1 tokens with ratios 2, 1 and 3, rewards 1, 10 and 100; A = 111 - 5, 110 - 5, 100 - 5."""
    member = Member(
        log_ratio_N=f64(2.0, 1.0, 3.0).log(),
        advantage=0.0,
        advantage_N=f64(106, 106, 95),
        reward=111.0,
        group=0,
        turns=Turns(num_actions_K=torch.tensor([2, 0, 1]), reward_K=f64(1, 10, 100)),
    )
    found = make_objective(RLOO).weights(member)
    assert found.logprob_seed_N is not None
    seed_N = found.weight_N * member.token_advantage_N + found.logprob_seed_N
    assert seed_N.tolist() == pytest.approx([2 * 1 + 2 * 10 + 6 * 100 - 2 * 5] * 2 + [6 * 100 - 6 * 5])
    assert (found.num_weights, found.num_clipped) == (3, 0)
    cut = make_objective(
        AlgorithmConfig(preset="rloo", credit="turn", ratio="sequence", treatment="truncate", max_weight=4)
    )
    assert cut.weights(member).weight_N.tolist() == pytest.approx([2, 2, 4]) and cut.weights(member).num_clipped == 1


@pytest.mark.parametrize(("mu", "ratio", "group_size"), [(PI, "none", 2), (PI, "sequence", 2), (MU, "sequence", 3)])
def test_its_expectation_is_the_gradient_of_the_expected_reward(mu: Tensor, ratio: Any, group_size: int) -> None:
    """Also where the policy decides how long an episode is, and where another policy sampled it."""
    objective = make_objective(AlgorithmConfig(preset="rloo", credit="turn", ratio=ratio))
    mean, variance = moments(objective, PI, mu, group_size=group_size)
    torch.testing.assert_close(mean, true_gradient(PI), rtol=0, atol=1e-12)
    by_episode = make_objective(AlgorithmConfig(preset="rloo", ratio=ratio))
    assert variance < moments(by_episode, PI, mu, group_size=group_size)[1]


def test_the_mean_of_all_that_reached_the_turn_also_turns_the_gradient() -> None:
    mean, _ = moments(AliveMean(RLOO), PI, MU, group_size=3)
    true = true_gradient(PI)
    assert float((mean * true).sum() / mean.norm() / true.norm()) < 0.99


def test_on_a_model_the_gradient_is_that_of_its_written_loss(tiny_model: Any) -> None:
    """Rewards of turns in episodes of one segment and of two, on-policy."""
    group = mixed_groups(tiny_model)[2]
    first, second, *others = group.trajectories
    rewarded = [
        replace(one, turns=tuple(replace(turn, reward=0.5 * at + 0.25) for at, turn in enumerate(one.turns)))
        for one in (first, second, *others)
    ]
    two = [replace(one, reward=rewarded[0].reward) for one in rewarded[:2]]
    cut = with_members(group, [episode_of(*two), *rewarded[2:]])
    algorithm = AlgorithmConfig(preset="rloo", credit="turn")
    objective = make_objective(algorithm)
    given = Group(
        reward_E=f64(*cut.episode_rewards),
        num_actions_E=torch.tensor([sum(one.num_action_tokens for one in each.segments) for each in cut.episodes]),
        episodes=tuple(each.segments for each in cut.episodes),
    )
    expected: dict[str, Tensor] = {}
    for each, advantage_N in zip(cut.episodes, objective.advantages(given), strict=True):  # type: ignore[arg-type]
        parts = torch.split(advantage_N, [one.num_action_tokens for one in each.segments])
        expected |= {one.id: part_N for one, part_N in zip(each.segments, parts, strict=True)}
    assert any(len(part_N.unique()) > 1 for part_N in expected.values())

    def loss(one: Any, logprob_N: Tensor, _: Tensor) -> Tensor:
        return one.weight * (expected[one.id] * logprob_N).sum() * len(cut.trajectories) / len(cut.episodes)

    ours = estimated(tiny_model, [cut], algorithm, num_episodes=len(cut.episodes))
    assert relative_error(ours, autograd_of(tiny_model, [cut], loss)) < 1e-5


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ({}, "baseline=opob_safe is made for one advantage an episode.*set baseline: none or leave_one_out"),
        ({"preset": "rloo", "ratio": "token"}, "ratio=token.*set ratio: none or sequence"),
        ({"preset": "rloo", "normalize_by_std": True}, "normalize_by_std=True.*set normalize_by_std: false"),
        ({"preset": "rloo", "ratio": "sequence", "treatment": "mask"}, "treatment=mask.*none or truncate"),
        ({"preset": "rloo", "variance_every": 5}, "variance_every=5.*set variance_every: 0"),
        ({"preset": "distill"}, "credit=turn does nothing under objective=distillation"),
        ({"preset": "rloo", "kl_beta": 0.1, "kl": "reward"}, "set kl: k2 or k3"),
    ],
)
def test_settings_that_make_no_sense_with_it_are_refused(settings: dict[str, Any], saying: str) -> None:
    with pytest.raises(ValueError, match=saying):
        AlgorithmConfig(credit="turn", **settings)


def test_groups_of_equal_rewards_are_kept_because_their_turns_may_differ() -> None:
    assert not RLOO.drops_equal_rewards and AlgorithmConfig(preset="rloo").drops_equal_rewards


def test_it_needs_turns() -> None:
    objective = make_objective(RLOO)
    assert isinstance(objective, TurnCredit) and objective.needs_turns
    with pytest.raises(ValueError, match=r"Group\.episodes"):
        objective.advantages(Group(reward_E=f64(1, 0), num_actions_E=torch.tensor([1, 1])))
    with pytest.raises(ValueError, match=r"Member\.turns"):
        objective.weights(Member(log_ratio_N=f64(0.5), advantage=1.0, reward=1.0, group=0))
