"""A learner with broken numbers ends with a clear error: it neither publishes them nor keeps refusing steps forever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import LearnerError
from agentrl.testing import with_members
from agentrl.types import TrajectoryGroup
from tests.agentrl.training.troubles import Trouble
from tests.trainer.trainer_builders import batch, config, mixed_groups
from trainer.learner import MAX_BROKEN, Learner

BROKEN_WEIGHTS = Trouble("the weights of version ... are broken: their logprobs are NaN or infinite.")
REFUSED = Trouble("step ... refused, weights kept: ...")
NEVER_AGAIN = Trouble("... steps in a row were refused, the last for: ...")


@pytest.fixture
def learner(tiny_model_dir: Path) -> Learner:
    return Learner(config(tiny_model_dir, learner={"lr": 1e-3}))


def test_weights_that_are_nan_are_not_published(learner: Learner) -> None:
    with torch.no_grad():
        learner.model.model.norm.weight[0] = math.nan
    with pytest.raises(LearnerError) as found:
        learner.logprobs([1, 2, 3])
    assert BROKEN_WEIGHTS.is_in(found.value)


def test_a_rate_that_breaks_the_weights_is_found_before_they_reach_an_engine(
    tiny_model_dir: Path, tiny_model: Any
) -> None:
    """A real step at an absurd learning rate."""
    learner = Learner(config(tiny_model_dir, learner={"lr": 1e15}))
    with pytest.raises(LearnerError) as found:
        for version in range(3):
            learner.step(batch(mixed_groups(tiny_model), version=version))
            learner.logprobs([1, 2, 3])
    assert BROKEN_WEIGHTS.is_in(found.value)


def test_steps_that_are_refused_for_ever_end_the_learner(
    learner: Learner, tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    groups = mixed_groups(tiny_model)

    def step(groups: Sequence[TrajectoryGroup], version: int) -> None:
        learner.step(replace(batch(groups, version=version), max_lag=version))

    poisoned = replace(groups[0].trajectories[1], reward=math.nan, id="poisoned")
    broken = [with_members(groups[0], (groups[0].trajectories[0], poisoned)), *groups[1:]]
    for version in range(MAX_BROKEN - 1):
        step(broken, version)
    assert REFUSED.is_in(caplog.text)
    step(groups, MAX_BROKEN - 1)  # a good step restarts the count
    for version in range(MAX_BROKEN, 2 * MAX_BROKEN - 1):
        step(broken, version)
    with pytest.raises(LearnerError) as found:
        step(broken, 2 * MAX_BROKEN - 1)
    assert NEVER_AGAIN.is_in(found.value) and "poisoned: reward not finite" in str(found.value)
