"""The quickstart with its shipped settings and fewer steps: each kind of problem can be learned, and the run learns."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

import agentrl
from envs.modmath_templates import TEMPLATES
from tests.device import engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

QUICKSTART = "configs/quickstart.yaml"
STEPS = 12
HALF_OF_THE_RISE = 0.2  # from 0.43 to 0.83 was measured after so many steps
NUM_TASKS = 96  # 16 of each template: with 4 samples 64 episodes, a standard error of 0.06
# The demonstrator is right in 0.4 of its episodes, so a good imitator is right in about 0.4 of its own: 0.30 to 0.57
# were measured, and the bounds leave three standard errors. A model that cannot copy digits has 0.03 to 0.07.
LOWEST, HIGHEST = 0.12, 0.75


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> agentrl.RunResult:
    """What `agentrl train configs/quickstart.yaml` makes: the model of the warm start, then the first steps."""
    folder: Path = tmp_path_factory.mktemp("quickstart")
    return agentrl.train(
        QUICKSTART,
        {
            "out_dir": str(folder / "runs"),
            "model.path": str(folder / "model"),
            "train.steps": STEPS,
            "train.max_minutes": None,
            "eval.every": 0,
            "eval.num_tasks": NUM_TASKS,
            **{f"engine.{key}": value for key, value in engine_settings(max_num_seqs=64).items()},
        },
    )


def test_every_template_can_be_learned_from_reward(trained: agentrl.RunResult) -> None:
    rewards = defaultdict(list)
    for group in trained.run.groups(0, kind="eval"):
        rewards[group.task.metadata["template"]] += [episode.reward for episode in group.episodes]
    solved = {template: round(mean(values), 3) for template, values in rewards.items()}
    assert solved.keys() == {template.name for template in TEMPLATES}
    assert all(LOWEST <= share <= HIGHEST for share in solved.values()), solved


def test_training_gains_half_of_what_it_was_measured_to_gain(trained: agentrl.RunResult) -> None:
    rise = trained.after.avg - trained.before.avg
    assert rise >= HALF_OF_THE_RISE, f"avg@4 {trained.before.avg:.3f} -> {trained.after.avg:.3f} in {STEPS} steps"
