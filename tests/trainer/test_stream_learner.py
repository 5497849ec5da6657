"""A learner that gets its batch in parts: what is checked, forgotten and reported. Equal steps: test_equality.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError, LearnerError, StaleTrajectoryError
from agentrl.testing import group
from agentrl.types import Batch
from tests.trainer.trainer_builders import batch, config, episode, mixed_groups, whole_weights
from trainer.learner import Learner

ROLLOUT = {"groups_per_step": 3, "group_size": 4, "max_lag": 0}


def streaming(model_dir: Path, **algorithm: Any) -> Learner:
    learner = {"lr": 1e-3, "stream_groups": True}
    return Learner(config(model_dir, learner=learner, rollout=ROLLOUT, algorithm={"rho_base": 1.0, **algorithm}))


def parts_of(whole: Batch) -> tuple[list[Batch], Batch]:
    """Each group by itself; the last one makes the batch whole."""
    single = [replace(whole, groups=(one,), num_missing=2 - number) for number, one in enumerate(whole.groups)]
    return single[:-1], single[-1]


@pytest.mark.parametrize("algorithm", [{"preset": "grpo"}, {"preset": "vcpo_safe"}])
def test_parts_that_are_dropped_leave_no_trace(
    tiny_model_dir: Path, tiny_model: Any, algorithm: dict[str, Any]
) -> None:
    groups = mixed_groups(tiny_model)
    early, last = parts_of(batch(groups))
    undisturbed, learner = streaming(tiny_model_dir, **algorithm), streaming(tiny_model_dir, **algorithm)
    before = whole_weights(learner.model)
    for part in early:
        learner.add(part)
    learner.drop_parts()
    assert torch.equal(whole_weights(learner.model), before)
    for one in (undisturbed, learner):
        for part in early:
            one.add(part)
        one.step(last)
    assert torch.equal(whole_weights(learner.model), whole_weights(undisturbed.model))
    assert not torch.equal(whole_weights(learner.model), before)


def test_the_seconds_before_the_batch_was_whole_are_part_of_the_step(tiny_model_dir: Path, tiny_model: Any) -> None:
    learner = streaming(tiny_model_dir)
    early, last = parts_of(batch(mixed_groups(tiny_model)))
    for part in early:
        learner.add(part)
    metrics = learner.step(last).metrics
    assert 0 < metrics["learner/early_gradient_s"] < metrics["learner/step_s"]
    assert learner.step(batch(mixed_groups(tiny_model), version=1)).metrics["learner/early_gradient_s"] == 0


def test_the_metrics_are_those_of_the_whole_batch(tiny_model_dir: Path, tiny_model: Any) -> None:
    whole = batch(mixed_groups(tiny_model))
    early, last = parts_of(whole)
    learner = streaming(tiny_model_dir)
    for part in early:
        learner.add(part)
    found, expected = learner.step(last).metrics, streaming(tiny_model_dir).step(whole).metrics
    assert found.keys() == expected.keys()
    timing = {"learner/step_s", "learner/early_gradient_s", "learner/tokens_per_s"}
    for name in expected.keys() - timing:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_part_is_checked_like_a_batch(tiny_model_dir: Path) -> None:
    learner = streaming(tiny_model_dir)
    learner.policy_version = 1
    part = batch([group(0, [episode("old-one", reward=1.0, version=0)])], version=1, max_lag=0)
    with pytest.raises(StaleTrajectoryError, match="old-one has lag 1"):
        learner.add(replace(part, num_missing=2))
    with pytest.raises(LearnerError, match="batch is for version 0, the learner is at 1"):
        learner.add(replace(part, policy_version=0, num_missing=2))


@pytest.mark.parametrize(
    ("late", "found"), [((1,), "2 different groups with 8 episodes"), ((1, 1), "2 different groups with 12 episodes")]
)
def test_parts_that_are_not_the_batch_are_refused(
    tiny_model_dir: Path, tiny_model: Any, late: tuple[int, ...], found: str
) -> None:
    """A group is lost, or counted twice: the gradient was divided by the episodes of three groups."""
    learner = streaming(tiny_model_dir)
    groups = mixed_groups(tiny_model)
    learner.add(replace(batch(groups[:1]), num_missing=2))
    with pytest.raises(LearnerError, match=f"have {found}.*rollout.groups_per_step=3"):
        learner.step(batch([groups[index] for index in late]))


def test_a_part_is_not_a_step(tiny_model_dir: Path, tiny_model: Any) -> None:
    learner = streaming(tiny_model_dir)
    with pytest.raises(LearnerError, match=r"2 groups of the batch of version 0 are missing.*Learner.add"):
        learner.step(replace(batch(mixed_groups(tiny_model)[:1]), num_missing=2))


def test_an_objective_that_looks_at_the_whole_batch_is_refused(tmp_path: Path) -> None:
    """One of the user's, of which the config knows nothing. No model is loaded before."""
    (tmp_path / "mine.py").write_text(
        "from trainer.objective.policy_gradient import PolicyGradient\n\n\n"
        "class WholeBatch(PolicyGradient):\n    needs_batch = True\n"
    )
    with pytest.raises(ConfigError, match=r"needs_batch of your class.*learner.stream_groups=false"):
        streaming(tmp_path / "no-model", objective=f"{tmp_path}/mine.py:WholeBatch")
