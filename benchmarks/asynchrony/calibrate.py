"""What an episode and a step cost on this machine, measured without waits, before anything is predicted.

Independent of predictions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.asynchrony import scores
from benchmarks.asynchrony.run import Cell, measured
from benchmarks.asynchrony.stage import Stage, staged
from benchmarks.asynchrony.waits import WaitingModMath

NUM_STEPS = 14
WARM_UP = 2
"""Steps left out: the engine compiles and caches fill."""
WAIT_STEPS = 2.0
"""Mean wait of an episode, in steps of training without waits and with lag 2: what a step costs when all overlaps."""


async def calibrated(config_path: Path, model: str | None) -> dict[str, Any]:
    """Short runs without waits: synchronous with all cores, with one each, and asynchronous. Raises AgentRLError."""
    header = reporting.header("calibration", {}).split("\n", 2)[2]  # first: its load is that of other programs
    async with staged(config_path, model) as stage:
        alone_s = await _alone(stage)
        start = await scores.score(stage, 0)
        whole = await _run(stage, "S1r", config_path)
        calls = dict(WaitingModMath.num_calls)
        split = await _run(stage, "S2r", config_path)
        overlapped = await _run(stage, "A2", config_path)
    episodes = sum(calls.values())
    calls_mean = sum(number * count for number, count in calls.items()) / episodes
    learner_step_s = _step_s(whole)
    publish_s = statistics.median(one["publish_s"] + one["publish_beside_s"] for one in whole["steps"][WARM_UP:])
    wait_s = sum(one["wait_batch_s"] for one in whole["steps"])
    rollout_core_s = whole["core_s"]["engine"] + whole["core_s"]["rest"]
    last = whole["steps"][-1]
    return {
        "header": header,
        "learner_step_s": round(learner_step_s, 4),
        "learner_step_one_core_s": round(_step_s(split), 4),
        "learner_cores": round(whole["core_s"]["learner"] / sum(one["learner_step_s"] for one in whole["steps"]), 3),
        "publish_s": round(publish_s, 4),
        "episode_core_s": round(rollout_core_s / whole["finished_episodes"], 5),
        "episode_alone_s": round(alone_s, 4),
        "rollout_cores": round(rollout_core_s / wait_s, 3),
        "calls": {str(number): round(count / episodes, 4) for number, count in sorted(calls.items())},
        "calls_mean": round(calls_mean, 4),
        "equal_share": round(last["groups_equal"] / (last["groups_equal"] + last["groups_trained"]), 4),
        "mean_wait_s": round(WAIT_STEPS * _seconds_a_step(overlapped), 2),
        "cores": 2,
        "start_score": start["avg"],
        "seconds_a_step": {run["arm"]: _seconds_a_step(run) for run in (whole, split, overlapped)},
    }


async def _run(stage: Stage, arm: str, config_path: Path) -> dict[str, Any]:
    cell = Cell(arm=arm, sigma=0.0, mean_wait_s=0.0, seed=100, num_steps=NUM_STEPS, kind="speed")
    return await measured(stage, cell, config_path=config_path, calls=1.0, keep_every=0)


def _step_s(run: Mapping[str, Any]) -> float:
    return statistics.median(float(one["learner_step_s"]) for one in run["steps"][WARM_UP:])


def _seconds_a_step(run: Mapping[str, Any]) -> float:
    first, last = run["steps"][WARM_UP - 1], run["steps"][-1]
    return round(float(last["at_s"] - first["at_s"]) / (last["version"] - first["version"]), 4)


async def _alone(stage: Stage) -> float:
    """Seconds of a group of episodes that is played with nothing beside it; median of several."""
    seconds = []
    for index, task in enumerate(stage.held_out[:8]):
        began = time.monotonic()
        await stage.held_out_player.play_group(stage.engine, index, task, kind="eval")
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)
