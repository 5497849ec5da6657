"""The real task's study: the lag is the configured one, nothing is skipped, and tables and picture show the runs."""

from __future__ import annotations

import asyncio
import json
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
from agentrl.errors import LearnerError
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Batch, Message, StepOutput, Task, user
from benchmarks import reporting, stability_task_pictures, stability_task_report
from benchmarks.stability_task import DECIDING, missing, parsed, specs_of
from benchmarks.stability_task_rules import DEFAULT_RULES, SHIPPED, TASK_RULES
from benchmarks.stability_task_run import Run, Spec, Stage
from benchmarks.stability_task_steps import NOTED, VARIANCE, summary


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


async def test_every_version_has_a_reward_where_four_do_not_divide_the_lag(stage: Stage) -> None:
    run = await Run(stage, Spec(rule="mean", lag=9, seed=0, lr=1e-3, num_steps=10)).record()
    assert len(run["curve"]) == 10  # type: ignore[arg-type]


async def test_a_learner_that_does_not_start_is_no_result_of_its_rule(stage: Stage) -> None:
    class Failing(Run):
        def _start(self) -> Any:
            raise LearnerError("the model is gone")

    with pytest.raises(LearnerError, match="the model is gone"):
        await Failing(stage, Spec(rule="mean", lag=0, seed=0, lr=1e-3, num_steps=2)).record()


@pytest.mark.parametrize(("options", "expected"), [(["--steps", "19"], "20"), (["--steps", "32"], "more than 32")])
def test_steps_that_give_no_verdict_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit):
        specs_of(parsed(options))
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_run_trains_at_its_lag_and_samples_every_version_that_it_can(stage: Stage, lag: int) -> None:
    run = await Run(stage, Spec(rule="opob_safe", lag=lag, seed=0, lr=1e-3, num_steps=5)).record()
    over, curve, steps = run["over_steps"], run["curve"], run["steps"]
    assert isinstance(over, dict) and isinstance(curve, list) and isinstance(steps, dict)
    middle, mean, largest = over["lag_max"]
    assert (middle, mean, largest) == (lag, sum(min(step, lag) for step in range(5)) / 5, lag)
    assert len(curve) == 5  # versions 0 to 4; that of the last is `accuracy`
    assert len(steps["ess_ratio"]) == 5
    assert run["broken_at"] is None
    assert list(stage.folder.iterdir()) == []


async def test_runs_share_an_engine_without_sharing_weights(stage: Stage) -> None:
    """What version 0 plays is played once; later each batch is of its own run's weights, of the right version."""
    played: dict[int, list[int]] = {0: [], 1: []}

    class Noting(Run):
        def _train(self, learner: Any, groups: Any) -> None:
            mine = played[["mean", "grpo"].index(self._spec.rule)]
            mine.append(groups[0].policy_version if mine else id(groups))
            super()._train(learner, groups)

    async with asyncio.TaskGroup() as both:
        for number, rule in enumerate(("mean", "grpo")):
            run = Noting(stage, Spec(rule=rule, lag=1, seed=0, lr=1e-3, num_steps=4), number=number)
            both.create_task(run.record())
    assert played[0][0] == played[1][0]
    assert played[0][1:] == played[1][1:] == [0, 1, 2]


async def test_the_learner_sees_the_changed_rewards_and_the_curve_does_not(stage: Stage) -> None:
    seen: list[float] = []

    class Noting(Run):
        def _train(self, learner: Any, groups: Any) -> None:
            step = learner.step

            def noting(batch: Batch) -> StepOutput:
                seen.extend(trajectory.reward for trajectory in batch.trajectories())
                output: StepOutput = step(batch)
                return output

            learner.step = noting
            super()._train(learner, groups)
            learner.step = step

    run = await Noting(stage, Spec(rule="mean", lag=0, seed=0, lr=1e-3, num_steps=3, reward="symmetric")).record()
    assert set(seen) == {-1.0, 1.0}
    assert all(0 <= value <= 1 for value in run["curve"])  # type: ignore[attr-defined]


async def test_a_run_whose_weights_break_is_recorded_as_such(stage: Stage) -> None:
    class Breaking(Run):
        def _train(self, learner: Any, groups: Any) -> None:
            if learner.policy_version == 2:
                raise LearnerError("NaN")
            super()._train(learner, groups)

    run = await Breaking(stage, Spec(rule="mean", lag=0, seed=0, lr=1e-3, num_steps=25)).record()
    assert (run["broken_at"], run["accuracy"]) == (2, 0.0)
    assert run["curve"][3:] == [0.0] * 22  # type: ignore[index]


def a_run(rule: str, curve: list[float], accuracy: float, **changes: Any) -> dict[str, Any]:
    return {
        **{"rule": rule, "lag": 32, "seed": 0, "lr": 1e-3, "num_steps": 60, "then": None, "reward": "0/1"},
        **{"curve": curve, "accuracy": accuracy, **summary({name: [0.5] * 60 for name in NOTED})},
        **{"date": "2026-11-22", "commit": "abc", "machine": "two cores; load when it began 0.1"},
        "variances": [{VARIANCE + name: 2.0 for name in ("none", "mean", "opob")}],
        **changes,
    }


def test_the_report_tells_a_run_that_fell_from_one_that_held(tmp_path: Path) -> None:
    runs = [a_run("tis", [0.8] * 30 + [0.1] * 30, 0.1), a_run(SHIPPED, [0.3] * 20 + [0.8] * 40, 0.8)]
    lines = stability_task_report.page(runs).splitlines()
    assert "| `tis` | 0.10 (1 of 1) |" in lines
    assert next(line for line in lines if line.startswith("| `tis` | 1 ")).startswith(
        "| `tis` | 1 | 0.10 | -0.70 | 1 | 1 | 0.45 | 20 |"
    )
    assert any(line.startswith(f"| `{SHIPPED}` | 1 | 0.80 |  | 0 | 0 |") for line in lines)
    pictures = stability_task_pictures.draw(runs, tmp_path)
    assert [path.name for path in pictures] == ["stability-task.svg", "stability-task-lag32.svg"]
    assert all("collapsed" in path.read_text() for path in pictures)


def test_differences_are_between_runs_of_one_seed() -> None:
    """0.9 - 0.8 and 0.3 - 0.6; the seed that the other rule lacks has no difference."""
    mine = [a_run("mean", [0.5], value, seed=seed) for seed, value in ((0, 0.9), (1, 0.3), (2, 1.0))]
    shipped = [a_run(SHIPPED, [0.5], value, seed=seed) for seed, value in ((1, 0.6), (0, 0.8))]
    assert stability_task_report.differences(mine, shipped) == pytest.approx([0.1, -0.3])


def test_the_interval_of_the_mean_is_that_of_all_resamples() -> None:
    """Of two values every mean is one of low, middle and high, with 1/4, 1/2 and 1/4 of the resamples."""
    assert reporting.interval([0.0, 1.0]) == (0.0, 1.0)
    assert reporting.interval([0.0, 1.0], share=0.4) == (0.5, 0.5)


def test_the_sweep_decides_first_and_skips_what_it_has(tmp_path: Path) -> None:
    specs = specs_of(parsed(["--seeds", "0", "1", "--rules", "mean", "tis"]))
    first = [(spec.lr, spec.lag, spec.seed) for spec in specs[:8]]
    assert {(lr, lag) for lr, lag, _ in first} == DECIDING
    assert [seed for *_, seed in first] == [0] * 4 + [1] * 4
    assert {spec.rule for spec in specs if spec.lag == 0} == {"mean"}  # tis is the same there
    out = tmp_path / "runs.jsonl"
    one = specs[3]
    run = a_run(one.rule, [], 0.5, lag=one.lag, seed=one.seed, lr=one.lr, num_steps=one.num_steps)
    out.write_text(json.dumps(run) + "\n")
    assert missing(specs, out) == [*specs[:3], *specs[4:]]


def test_only_rules_that_a_config_can_say_are_run() -> None:
    assert set(DEFAULT_RULES) <= set(TASK_RULES)
    assert not {"opob_code", "opob_no_w2", "opob_proxy"} & set(TASK_RULES)
