"""The measured variance of the gradient against the scatter of the groups' own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.config import AlgorithmConfig
from agentrl.config.presets import PRESETS, Preset
from agentrl.testing import episode_of, with_members
from agentrl.types import TrajectoryGroup
from tests.trainer.trainer_builders import mixed_groups
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator
from trainer.split_variance import SplitVariance, comparable


def four_groups(model: Any) -> list[TrajectoryGroup]:
    """Four groups of four members, each with a spread of rewards."""
    first, second, equal = mixed_groups(model)
    rewards = [0.0, 1.0, 0.0, 0.5]
    spread = with_members(equal, tuple(replace(m, reward=r) for m, r in zip(equal.trajectories, rewards, strict=True)))
    return [first, second, spread, with_members(replace(first, group_id=3), first.trajectories[::-1])]


def measurer(model: Any, algorithm: AlgorithmConfig) -> SplitVariance:
    attention.install(model)
    return SplitVariance(
        model,
        algorithm,
        pack_tokens=512,
        share=lambda groups: groups,
        gather=lambda records, kind: records,
        reduce=lambda tensor: None,
    )


def gradient(model: Any, groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig) -> torch.Tensor:
    attention.install(model)
    estimator = Estimator(model, algorithm)
    estimator.estimate(groups, policy_version=0, num_episodes=sum(len(g.trajectories) for g in groups))
    return torch.cat([total.double().flatten() for total in estimator.sums.total])


@pytest.mark.parametrize("baseline", ["none", "mean", "opob", "opob_safe", "otb"])
def test_the_mean_over_all_splits_is_the_scatter_of_the_groups(tiny_model: Any, baseline: Any) -> None:
    groups = four_groups(tiny_model)
    algorithm = AlgorithmConfig(baseline=baseline)
    per_group = torch.stack([gradient(tiny_model, [one], algorithm) for one in groups])
    scatter = float((per_group - per_group.mean(0)).square().sum()) / (4 * 3)
    orders = [[groups[place] for place in order] for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))]  # all splits
    split = measurer(tiny_model, algorithm)
    found = [split.measure(order, policy_version=0)[f"vitals/split_variance_{baseline}"] for order in orders]
    assert sum(found) / len(found) == pytest.approx(scatter, rel=1e-4)


def test_segments_of_an_episode_are_counted_as_one(tiny_model: Any) -> None:
    first, *others = four_groups(tiny_model)[0].trajectories
    attention.install(tiny_model)
    segments = [replace(first, id=f"{first.id}.{number}", weight=0.5) for number in range(2)]
    group = with_members(four_groups(tiny_model)[0], [episode_of(*segments), *others])
    (stats,) = Estimator(tiny_model, AlgorithmConfig()).estimate([group], policy_version=0, num_episodes=4)
    assert [[one.id for one in episode] for episode in stats.episodes()] == [
        [segment.id for segment in segments],
        *([other.id] for other in others),
    ]


def test_the_weights_stay_as_they_are(tiny_model: Any) -> None:
    before = [parameter.clone() for parameter in tiny_model.parameters()]
    measurer(tiny_model, AlgorithmConfig()).measure(four_groups(tiny_model), policy_version=0)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in tiny_model.parameters())


def test_one_group_has_no_halves(tiny_model: Any) -> None:
    assert measurer(tiny_model, AlgorithmConfig()).measure(four_groups(tiny_model)[:1], policy_version=0) == {}


def test_baselines_that_need_one_weight_a_trajectory_are_left_out_where_every_token_has_one() -> None:
    assert [a.baseline for a in comparable(AlgorithmConfig(preset="grpo"))] == [
        "none",
        "mean",
        "leave_one_out",
        "length_weighted",
    ]


def test_a_class_of_the_users_and_what_depends_on_the_advantages_sign_are_compared_with_nothing_else() -> None:
    own = AlgorithmConfig(objective="trainer.objective:PolicyGradient", preset="rloo")
    assert comparable(own) == [own]
    masked = AlgorithmConfig(preset="dapo", ratio="sequence", spurious={"probability": 0.1, "entropy": 1.0})
    assert not {"opob", "opob_safe", "otb"} & {one.baseline for one in comparable(masked)}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_baseline_in_use_is_among_those_compared(preset: Preset) -> None:
    algorithm = AlgorithmConfig(preset=preset)
    assert algorithm.baseline in [one.baseline for one in comparable(algorithm)]
