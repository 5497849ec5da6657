"""Extreme numbers through the whole step: huge ratios, empty groups, broken logprobs, overflow."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.testing import completion, group, trajectory
from agentrl.training import learner_api as api
from agentrl.types import Batch, Task, Trajectory, Turn
from tests.trainer.trainer_builders import architecture, batch, config, episode, mixed_groups, whole_weights
from trainer.gradient import attention
from trainer.gradient.step_gradient import Estimator
from trainer.learner import Learner

NO_TASK = Task(id="t", prompt="?")


@pytest.fixture(scope="module")
def learner(tiny_model_dir: Path) -> Learner:
    return Learner(config(tiny_model_dir, learner={"lr": 1e-4}))


def weights_of(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in learner.model.parameters()])


def step(learner: Learner, groups: list[Any]) -> dict[str, float]:
    version = learner.policy_version
    metrics = learner.step(batch(groups, version=version, max_lag=version)).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    return metrics


def with_logprobs(name: str, logprob: float, num_actions: int, *, reward: float) -> Trajectory:
    ids = [5 + t % 200 for t in range(num_actions)]
    return trajectory(
        name, [Turn(observation_ids=(1, 2, 3), completion=completion(ids, [logprob] * num_actions, 0))], reward=reward
    )


def test_log_ratios_of_ten_thousand_either_way_are_one_ordinary_step(learner: Learner, tiny_model: Any) -> None:
    """The large ratio dominates the batch: rho = 1/B and its weight is truncated at 8; the small one has weight 0."""
    above = with_logprobs("above", -2e3, 6, reward=1.0)
    below = with_logprobs("below", -1e-6, 2000, reward=0.0)
    others = [episode(str(i), reward=float(i % 2), seed=i, model=tiny_model) for i in range(2)]
    before, skipped = weights_of(learner), learner.state_dict()["skipped_steps"]
    estimator = Estimator(learner.model, AlgorithmConfig())
    stats = estimator.estimate([group(0, [above, below, *others])], policy_version=0, num_episodes=4)
    members = stats[0].trajectories
    assert members[0].log_weight > 1e4 and members[1].log_weight < -1e4
    assert [round(member.weight, 6) for member in members[:2]] == [8.0, 0.0]
    metrics = step(learner, [group(0, [above, below, *others])])
    assert metrics["learner/ess_ratio"] == pytest.approx(0.25)
    assert metrics["learner/skipped_steps"] == skipped
    assert not torch.equal(weights_of(learner), before)


def test_an_empty_group_changes_nothing(tiny_model: Any) -> None:
    attention.install(tiny_model)
    groups, gradients = mixed_groups(tiny_model), []
    for found in (groups, [group(7, [], task=NO_TASK), *groups]):
        estimator = Estimator(tiny_model, AlgorithmConfig())
        stats = estimator.estimate(found, policy_version=0, num_episodes=12)
        gradients.append(torch.cat([total.flatten() for total in estimator.sums.total]))
    assert torch.equal(*gradients)
    assert not stats[0].has_gradient and not stats[0].has_spread


def test_a_step_with_an_empty_group_reports_finite_numbers(learner: Learner, tiny_model: Any) -> None:
    assert step(learner, [group(7, [], task=NO_TASK), *mixed_groups(tiny_model)])["learner/num_trajectories"] == 12


@pytest.mark.parametrize("ratio", ["token", "geometric_mean"])
def test_of_single_tokens_every_ratio_is_that_of_the_sequence(tiny_model: Any, ratio: Any) -> None:
    attention.install(tiny_model)
    members = [
        episode(str(i), reward=float(i % 2), shape=((5 + i, 1),), seed=i, model=tiny_model, off_policy=0.5)
        for i in range(4)
    ]
    gradients = []
    for one in (ratio, "sequence"):
        estimator = Estimator(tiny_model, AlgorithmConfig(preset="tis", ratio=one))
        estimator.estimate([group(0, members)], policy_version=0, num_episodes=4)
        gradients.append(torch.cat([total.flatten() for total in estimator.sums.total]))
    torch.testing.assert_close(*gradients)
    assert bool(gradients[0].any())


def poisoned(one: Batch, logprob: float) -> Batch:
    """The batch with one broken logprob of the engine, which an ordinary constructor refuses."""
    broken = one.groups[0].trajectories[1].turns[0].completion
    object.__setattr__(broken, "behavior_logprobs", (logprob, *broken.behavior_logprobs[1:]))
    return one


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, 0.5])
def test_a_record_refuses_a_logprob_that_cannot_be_one(logprob: float) -> None:
    with pytest.raises(ValueError, match="logprob of token 1"):
        completion([3, 4], [-1.0, logprob], 0)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_the_wire_refuses_it_too(tiny_model: Any, logprob: float) -> None:
    body = api.encode(poisoned(batch(mixed_groups(tiny_model)), logprob))
    with pytest.raises(msgspec.ValidationError, match=r"logprob of token 0 is (nan|-inf)"):
        api.decode(body, Batch)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_past_all_of_them_the_step_is_refused_by_the_trajectorys_name(
    learner: Learner, tiny_model: Any, caplog: pytest.LogCaptureFixture, logprob: float
) -> None:
    before, skipped = weights_of(learner), learner.state_dict()["skipped_steps"]
    version = learner.policy_version
    with caplog.at_level(logging.WARNING):
        learner.step(poisoned(batch(mixed_groups(tiny_model), version=version, max_lag=version), logprob))
    assert torch.equal(weights_of(learner), before)
    assert learner.state_dict()["skipped_steps"] == skipped + 1
    assert "trajectory g0m1: log_weight" in caplog.text


@pytest.mark.parametrize(
    ("zero_stage", "algorithm", "reason"),
    [
        (0, {}, "trajectory g0m0: score_norm not finite"),
        (2, {"preset": "grpo"}, "the summed gradient overflows"),
        (3, {"baseline_norms": "proxy"}, "the summed gradient overflows"),
    ],
)
def test_gradients_that_overflow_in_bfloat16_refuse_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zero_stage: int, algorithm: dict[str, Any], reason: str
) -> None:
    """Logits are ordinary, but the head's gradient overflows: its inputs are as large as its weights are small."""
    import deepspeed

    model = architecture("Qwen3")
    model.save_pretrained(tmp_path)
    sections = {"learner": {"zero_stage": zero_stage}, "algorithm": algorithm}
    learner = Learner(config(tmp_path, dtype="bfloat16", **sections))
    scale, head = learner.model.model.norm.weight, learner.model.lm_head.weight
    with torch.no_grad(), deepspeed.zero.GatheredParameters([scale, head], modifier_rank=0):
        scale.mul_(1e22)
        head.mul_(1e-22)
    before = whole_weights(learner.model)
    with caplog.at_level(logging.WARNING):
        metrics = step(learner, mixed_groups(model))
    assert metrics["learner/skipped_steps"] == 1.0
    assert reason in caplog.text
    assert torch.equal(whole_weights(learner.model), before)
    assert len(learner.logprobs([1, 2, 3])) == 2
