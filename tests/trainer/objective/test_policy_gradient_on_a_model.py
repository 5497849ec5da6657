"""Every preset through the packed estimator against one autograd pass per trajectory, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.presets import PRESETS
from agentrl.testing import episode_of, with_members
from agentrl.types import Trajectory, TrajectoryGroup
from tests.trainer.trainer_builders import mixed_groups
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator
from trainer.objective import Group, Member, PolicyGradient, calls, make_objective
from trainer.objective.baselines import logit_norm2
from trainer.reference import Reference


def scored(model: Any, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """(log pi, sum of pi^2, log mu) of the action tokens; the first with its graph."""
    ids = torch.tensor(trajectory.token_ids())
    acted = torch.tensor(trajectory.action_mask(), dtype=torch.bool)[1:]
    log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)[acted]
    behavior = torch.tensor(trajectory.behavior_logprobs(), dtype=torch.float64)[1:][acted]
    return log_p.gather(1, ids[1:][acted][:, None])[:, 0], log_p.detach().exp().square().sum(-1), behavior


def frozen_copy(model: Any) -> Any:
    """Another model, for objectives that compare with one."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    attention.install(other)
    return other


def reference(model: Any, groups: list[Any], algorithm: AlgorithmConfig) -> Tensor:
    frozen = frozen_copy(model).double()
    model, objective = copy.deepcopy(model).double(), make_objective(algorithm)
    parameters = list(model.parameters())
    members, scores, coefficients = [], [], []
    for number, group in enumerate(groups):
        reward = torch.tensor(group.rewards_G, dtype=torch.float64)
        num_actions = torch.tensor([member.num_action_tokens for member in group.trajectories])
        advantage, length = (
            objective.advantages(Group(reward_E=reward, num_actions_E=num_actions)),
            objective.lengths(num_actions),
        )
        for i, trajectory in enumerate(group.trajectories):
            logprob, sum_pi2, behavior = scored(model, trajectory)
            value = 0.0 if advantage is None else float(advantage[i])
            log_ratio, energy = logprob.detach() - behavior, logit_norm2(logprob.detach(), sum_pi2)
            members.append(
                Member(
                    log_ratio_N=log_ratio,
                    advantage=value,
                    reward=trajectory.reward,
                    group=number,
                    episode=i,
                    logprob_N=logprob.detach(),
                    logit_norm2_N=energy,
                    reference_logprob_N=scored(frozen, trajectory)[0].detach(),
                )
            )
            scores.append((logprob, float(length[i])))
            coefficients.append(value)
    weights = calls.weigh(objective, members)
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for weight, (logprob, length), coefficient in zip(weights, scores, coefficients, strict=True):
        seed = coefficient * weight.weight_N
        seed = seed if weight.logprob_seed_N is None else seed + weight.logprob_seed_N
        loss = (seed * logprob).sum() / length / len(members)
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    return total


@pytest.mark.parametrize("preset", sorted(name for name in PRESETS if not name.startswith("vcpo")))
def test_a_preset_is_estimated_exactly_from_packs(tiny_model: Any, preset: Any) -> None:
    """Presets without norms; those of VCPO are in test_step_gradient.py."""
    groups = mixed_groups(tiny_model, off_policy=0.4)
    algorithm = AlgorithmConfig(preset=preset)
    frozen = Reference(frozen_copy(tiny_model)).logprobs
    estimator = Estimator(tiny_model, algorithm, pack_tokens=40, reference=frozen)
    estimator.estimate(groups, policy_version=0, num_episodes=12)
    ours = torch.cat([total.flatten() for total in estimator.sums.total]).double()
    theirs = reference(tiny_model, groups, algorithm)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_in_which_nobody_acted_has_no_gradient(tiny_model: Any, preset: Any) -> None:
    """Two groups with different rewards, so that only the missing actions can be the reason."""
    silent = [
        with_members(one, tuple(replace(member, turns=()) for member in one.trajectories))
        for one in mixed_groups(tiny_model)[:2]
    ]
    frozen = Reference(frozen_copy(tiny_model)).logprobs
    estimator = Estimator(tiny_model, AlgorithmConfig(preset=preset), reference=frozen)
    stats = estimator.estimate(silent, policy_version=0, num_episodes=8)
    assert not any(total.any() for total in estimator.sums.total)
    assert [(group.has_spread, group.has_gradient) for group in stats] == [(True, False)] * 2
    assert all(member.weight == 1.0 and not member.non_finite() for group in stats for member in group.trajectories)


@pytest.mark.parametrize("preset", ["dapo", "cispo", "m2po", "bapo"])
def test_under_a_length_of_the_group_every_token_of_an_episode_in_segments_counts_alike(
    tiny_model: Any, preset: Any
) -> None:
    """Two turns on their own, as segments, against an episode: J = 1/sum|o| sum_segments sum_t w_t A log pi_t."""
    whole = mixed_groups(tiny_model, off_policy=0.3)[0]
    first, *others = whole.trajectories
    halves = [
        replace(first, id=f"{first.id}.{number}", turns=(turn,), weight=0.5) for number, turn in enumerate(first.turns)
    ]
    assert len({member.num_action_tokens for member in halves}) == 2
    group = with_members(whole, [episode_of(*halves), *others])
    algorithm = AlgorithmConfig(preset=preset)
    estimator = Estimator(tiny_model, algorithm, pack_tokens=40)
    estimator.estimate([group], policy_version=0, num_episodes=4)
    ours = torch.cat([total.flatten() for total in estimator.sums.total]).double()
    theirs = by_tokens(tiny_model, group, algorithm)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def by_tokens(model: Any, group: TrajectoryGroup, algorithm: AlgorithmConfig) -> Tensor:
    model, objective = copy.deepcopy(model).double(), PolicyGradient(algorithm)
    reward = torch.tensor(group.episode_rewards, dtype=torch.float64)
    advantage = (reward - reward.mean()) / reward.std()
    logprobs, members = [], []
    for value, record in zip(advantage.tolist(), group.episodes, strict=True):
        for segment in record.segments:
            logprob, _, behavior = scored(model, segment)
            logprobs.append(logprob)
            members.append(
                Member(log_ratio_N=logprob.detach() - behavior, advantage=value, reward=segment.reward, group=0)
            )
    weights = calls.weigh(objective, members)
    stats = [
        weight.weight_N * member.advantage * logprob
        for weight, member, logprob in zip(weights, members, logprobs, strict=True)
    ]
    gradients = torch.autograd.grad(torch.cat(stats).mean(), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])
