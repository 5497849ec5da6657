"""V-trace's weights, STAPO's mask and the entropy term: numbers by hand, and autograd of the written loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from tests.trainer.softmax_policy import Episode, float64, groups, logprobs, objective_gradient, policy, score
from tests.trainer.test_diagnostics import group, stats
from trainer import diagnostics
from trainer.objective import Group, Member, calls, make_objective, ratios
from trainer.objective.silencing import quantile

DAPO_WITH = {"probability": 0.3, "entropy": 1.2}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "rho", "c", "expected"),
    [
        ((2.0, 0.5, 3.0), 1.0, 1.0, (0.5, 0.5, 1.0)),
        ((2.0, 0.5, 3.0), math.inf, math.inf, (3.0, 1.5, 3.0)),
        ((2.0, 0.5, 3.0), 2.0, 1.0, (2.0, 1.0, 2.0)),
        ((3.0,), 1.0, 1.0, (1.0,)),
        ((0.25,), 1.0, 1.0, (0.25,)),
        ((1.0, 1.0, 1.0), 1.0, 1.0, (1.0, 1.0, 1.0)),
        ((), 1.0, 1.0, ()),
    ],
)
def test_vtrace_by_hand(ratio: tuple[float, ...], rho: float, c: float, expected: tuple[float, ...]) -> None:
    torch.testing.assert_close(ratios.vtrace(f64(*ratio).log(), rho=rho, c=c).exp(), f64(*expected))


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_vtrace_never_overflows_and_counts_what_was_cut(extreme: float) -> None:
    objective = make_objective(AlgorithmConfig(preset="vtrace"))
    found = objective.weights(Member(log_ratio_N=f64(0.0, extreme, -0.1), advantage=1.0, reward=1.0, group=0))
    assert bool(found.weight_N.isfinite().all()) and bool((found.weight_N <= 1).all())
    assert (found.num_clipped, found.num_weights) == (1 if extreme > 0 else 0, 3)


def sampled(advantage: float, *, group: int = 0) -> Member:
    """Three tokens, of which the second is unlikely where the policy is sure."""
    return Member(
        log_ratio_N=f64(0.0, 0.1, -0.1),
        advantage=advantage,
        reward=1.0,
        group=group,
        logprob_N=f64(0.5, 0.001, 0.001).log(),
        entropy_N=f64(1.0, 0.1, 2.0),
    )


@pytest.mark.parametrize(
    ("length", "expected"), [(True, (1.5, 0.0, 1.5)), (False, (1.0, 0.0, 1.0)), ("group", (1.2, 0.0, 1.2))]
)
def test_a_spurious_token_of_a_rewarded_episode_is_left_out_and_the_loss_divided_by_the_others(
    length: Any, expected: tuple[float, ...]
) -> None:
    """M = (1, 0, 1) and L' = 2 of 3; with the group's length 5 of 6."""
    objective = make_objective(
        AlgorithmConfig(preset="rloo", normalize_by_length=length, spurious={"probability": 0.002, "entropy": 0.5})
    )
    rewarded, punished = calls.weigh(objective, [sampled(1.0), sampled(-1.0)])
    torch.testing.assert_close(rewarded.weight_N, f64(*expected))
    torch.testing.assert_close(punished.weight_N, torch.full((3,), 1.2 if length == "group" else 1.0).double())
    assert (rewarded.num_silenced, punished.num_silenced) == (1, 0)


def test_an_episode_of_spurious_tokens_alone_adds_nothing() -> None:
    settings = {"probability": 0.9, "entropy": 9.0}
    objective = make_objective(AlgorithmConfig(preset="grpo", spurious=settings))
    (found,) = calls.weigh(objective, [sampled(1.0)])
    assert found.weight_N.tolist() == [0.0, 0.0, 0.0] and found.num_silenced == 3


def test_the_entropys_bound_may_be_a_quantile_of_the_batch() -> None:
    assert [quantile(f64(4.0, 1.0, 3.0, 2.0), share) for share in (0.1, 0.25, 0.99)] == [1.0, 2.0, 4.0]
    settings = {"probability": 0.002, "entropy_quantile": 0.5}
    objective = make_objective(AlgorithmConfig(preset="grpo", spurious=settings))
    assert objective.needs_batch
    found = calls.weigh(objective, [sampled(1.0), sampled(1.0)])  # entropies .1 .1 1 1 2 2: the bound is 1
    assert [one.num_silenced for one in found] == [1, 1]


def test_a_mask_that_keeps_every_token_is_dapo_to_the_bit() -> None:
    theta = policy()
    batch = groups(theta, off_policy=0.4)
    rare = AlgorithmConfig(preset="dapo", spurious={"probability": 1e-9, "entropy": 1.0})
    assert torch.equal(
        objective_gradient(theta, batch, rare), objective_gradient(theta, batch, AlgorithmConfig(preset="dapo"))
    )


def test_stapo_has_the_gradient_of_its_written_loss() -> None:
    """J = 1/sum M sum_i sum_t M min(r A, clip(r, .8, 1.28) A)    arXiv 2602.15620, on DAPO's loss"""
    theta = policy()
    batch = groups(theta, off_policy=0.4)
    log_pi = theta.detach().log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)

    def of_group(members: list[Episode]) -> Tensor:
        reward = float64([episode.reward for episode in members])
        if reward.std() == 0:
            return 0.0 * theta.sum()
        stats, masks = [], []
        for episode, advantage in zip(members, (reward - reward.mean()) / reward.std(), strict=True):
            logprob = logprobs(theta, episode)
            ratio = (logprob - episode.behavior).exp()
            low = (logprob.exp() < DAPO_WITH["probability"]) & (entropy[episode.states] < DAPO_WITH["entropy"])
            masks.append(~(low & (advantage > 0)))
            stats.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * masks[-1])
        return torch.cat(stats).sum() / torch.cat(masks).sum()

    theirs = score(theta, torch.stack([of_group(members) for members in batch]).mean())
    ours = objective_gradient(theta, batch, AlgorithmConfig(preset="dapo", spurious=DAPO_WITH))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    without = objective_gradient(theta, batch, AlgorithmConfig(preset="dapo"))
    assert (ours - without).norm() > 0.01 * without.norm()


def test_too_many_spurious_tokens_are_told() -> None:
    many = [group(stats(num_silenced=1, num_action_tokens=100), stats(num_silenced=0, num_action_tokens=100))]
    assert diagnostics.spurious_share(many) == pytest.approx(0.005)
    (alarm,) = diagnostics.alarms(1.0, diagnostics.spurious_share(many))
    assert "0.50%" in alarm and "algorithm.spurious.probability" in alarm
    assert diagnostics.alarms(1.0, 1e-3) == []
    spurious = AlgorithmConfig(preset="dapo", spurious=DAPO_WITH)
    found = diagnostics.breakdowns(many, algorithm=spurious, grad_norm=None)
    assert found["learner/spurious_share"] == pytest.approx(0.005)


def test_the_entropy_term_acts_in_groups_of_equal_rewards_too() -> None:
    objective = make_objective(AlgorithmConfig(preset="grpo", entropy_coef=0.25))
    member = sampled(0.0)
    (found,) = calls.weigh(objective, [member])
    assert found.entropy_seed_N is not None and found.entropy_seed_N.tolist() == [0.25] * 3
    equal = Group(reward_E=f64(1.0, 1.0), num_actions_E=torch.tensor([3, 2]))
    assert objective.advantages(equal).tolist() == [0.0, 0.0]
    assert make_objective(AlgorithmConfig(preset="grpo")).advantages(equal) is None
