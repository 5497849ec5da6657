"""The real task's study: the lag is the configured one, nothing is skipped, and tables and picture show the runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.data.source import held_out_tasks
from agentrl.env import Episode, Split, ToolEnv, load_env_class
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Task, user
from benchmarks import stability_task_report
from benchmarks.stability_task import NOTED, OWN_RULES, Run, Spec, Stage


class Seven(ToolEnv):
    """Rewards a text with a seven in it."""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return (Task(id=f"{split}-{i}", prompt=f"{i}?", answer="7") for i in range(4))

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float("7" in episode.final_text)}


@pytest.fixture
def config(tiny_model_dir: Path) -> Config:
    from trainer import ranks

    ranks.set_defaults(os.environ)
    tree = {
        "name": "study",
        "env": {"target": f"{__name__}:Seven"},
        "model": {"path": str(tiny_model_dir), "dtype": "float32"},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_turn_tokens": 32},
        "eval": {"num_tasks": 2, "samples_per_task": 1},
    }
    return parse(tree, source="the test")


@pytest.fixture
def stage(config: Config, tmp_path: Path) -> Stage:
    tokenizer = TurnTokenizer.load(config.model.path)
    numbers = count()
    engine = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: str(next(numbers) % 8))
    return Stage(
        config=config,
        env_class=load_env_class(config.env.target, {}),
        engine=engine,
        player=GroupPlayer(Seven, settings_of(config), TokenRunners(tokenizer)),
        held_out=held_out_tasks(Seven, config.env, num_tasks=2),
        folder=tmp_path,
    )


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_run_trains_at_its_lag_and_samples_every_version_that_it_can(stage: Stage, lag: int) -> None:
    run = await Run(stage, Spec(rule="opob_safe", lag=lag, seed=0, lr=1e-3, num_steps=5)).record()
    steps = run["steps"]
    assert isinstance(steps, dict)
    assert steps["lag_max"] == [min(step, lag) for step in range(5)]
    curve = run["curve"]
    assert isinstance(curve, list)
    assert len(curve) == 5  # versions 0 to 4; that of the last is `accuracy`
    assert sorted(int(path.name) for path in stage.folder.iterdir()) == list(range(5 - lag, 6))


def a_run(rule: str, curve: list[float], accuracy: float) -> dict[str, Any]:
    return {
        **{"rule": rule, "lag": 32, "seed": 0, "lr": 1e-3, "num_steps": 60, "then": None},
        **{"curve": curve, "accuracy": accuracy, "steps": {name: [0.5] * 60 for name in NOTED}},
        "variances": [{stability_task_report.VARIANCE + name: 2.0 for name in stability_task_report.BASELINES}],
    }


def test_the_report_tells_a_run_that_fell_from_one_that_held(tmp_path: Path) -> None:
    runs = [a_run("tis", [0.8] * 30 + [0.1] * 30, 0.1), a_run("zero", [0.3] * 20 + [0.8] * 40, 0.8)]
    lines = stability_task_report.tables(runs).splitlines()
    assert next(line for line in lines if line.startswith("| `tis`")).startswith("| `tis` | 1 | 1 | 1 | 0.10 | 20 |")
    assert next(line for line in lines if line.startswith("| `zero`")).startswith("| `zero` | 1 | 0 | 0 | 0.80 |")
    stability_task_report.draw(runs, tmp_path)
    assert "collapsed" in (tmp_path / "stability-task.svg").read_text()


def test_only_rules_that_a_config_can_say_are_run() -> None:
    assert {"opob", "opob_safe", "tis", "uncorrected", "zero", "mean"} < set(OWN_RULES)
    assert not {"opob_code", "opob_no_w2", "opob_proxy"} & set(OWN_RULES)
