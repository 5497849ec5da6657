"""Tests of the asynchronous benchmark's waits, clock and arms."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
from pathlib import Path

import pytest

from agentrl.types import Task
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.run import Cell, measured
from benchmarks.asynchrony.scores import scores_of
from benchmarks.asynchrony.stage import EVERY_CORE, QUICKSTART, configured, staged
from benchmarks.asynchrony.waits import CUT_MEDIANS, Clock, WaitingModMath, median_for, wait_s

TASK = Task(id="train-0-5-lcm", prompt="", answer="1")


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_an_episode_waits_as_long_on_average_whatever_the_spread(sigma: float) -> None:
    median_s = median_for(3.0, calls=1.5, sigma=sigma)
    waits = [wait_s(f"t{task}", 0, 0, sigma=sigma, median_s=median_s) for task in range(20_000)]
    cut = 1.0 if sigma < 1.2 else 0.85  # exp(1.5 z) is cut at 20 medians in 2.3 % of the draws
    assert 1.5 * statistics.fmean(waits) == pytest.approx(3.0 * cut, rel=0.05)
    assert max(waits) <= CUT_MEDIANS * median_s


def test_a_wait_depends_on_task_member_and_call_alone() -> None:
    again = wait_s("t", 1, 2, sigma=1.0, median_s=2.0)
    assert again == wait_s("t", 1, 2, sigma=1.0, median_s=2.0)
    others = [wait_s("u", 1, 2, sigma=1.0, median_s=2.0), wait_s("t", 0, 2, sigma=1.0, median_s=2.0)]
    others.append(wait_s("t", 1, 1, sigma=1.0, median_s=2.0))
    assert again not in others
    assert math.log(wait_s("t", 1, 2, sigma=0.5, median_s=2.0) / 2) == pytest.approx(math.log(again / 2) / 2)


async def test_the_clock_skips_what_everything_waits_for() -> None:
    clock, woken = Clock(), list[tuple[str, float]]()
    began_s = clock.now()

    async def episode(name: str, seconds: float) -> None:
        await clock.wait(seconds)
        woken.append((name, clock.now() - began_s))
        clock.episode_ended()

    clock.num_computing = 3
    async with asyncio.TaskGroup() as episodes:
        for name, seconds in (("slow", 5000.0), ("fast", 1000.0), ("middle", 3000.0)):
            episodes.create_task(episode(name, seconds))
    assert [name for name, _ in woken] == ["fast", "middle", "slow"]
    assert [at_s for _, at_s in woken] == pytest.approx([1000.0, 3000.0, 5000.0], abs=60)
    assert clock.skipped_s == pytest.approx(5000.0, abs=60)
    assert clock.num_computing == 0


async def test_the_clock_skips_nothing_while_an_episode_computes_or_the_learner_works() -> None:
    is_idle = False
    clock = Clock(is_idle=lambda: is_idle)
    clock.num_computing = 2
    waiting = asyncio.create_task(clock.wait(5000.0))
    await asyncio.sleep(0.05)
    assert clock.skipped_s == 0.0  # the other episode computes
    clock.episode_ended()
    await asyncio.sleep(0.05)
    assert clock.skipped_s == 0.0  # the learner works
    is_idle = True
    await waiting
    assert clock.skipped_s > 4000


async def test_a_cancelled_wait_and_a_cancelled_group_leave_the_count_as_it_was() -> None:
    clock = Clock(is_idle=lambda: False)
    WaitingModMath.begin_run(clock)

    async def play() -> None:
        with WaitingModMath.computing(TASK, 8):
            env = WaitingModMath(sigma=1.0, median_s=5000.0)
            try:
                await env.reset(task=TASK)
                await env.python("print(1)")
            finally:
                await env.close()

    playing = asyncio.create_task(play())
    async with asyncio.timeout(30):
        while clock.num_computing != 7:
            await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert clock.num_computing == 0


async def test_a_repeated_episode_computes_again() -> None:
    clock = Clock(is_idle=lambda: False)
    WaitingModMath.begin_run(clock)
    with WaitingModMath.computing(TASK, 2):
        first, second, again = (WaitingModMath() for _ in range(3))
        await first.reset(task=TASK)
        await second.reset(task=TASK)
        await first.close()  # it failed
        assert clock.num_computing == 1
        await again.reset(task=TASK)
        assert clock.num_computing == 2
        await second.close()
        assert clock.num_computing == 1
        await again.close()
        assert clock.num_computing == 0
    assert clock.num_computing == 0


def test_every_arm_is_a_config_of_the_product() -> None:
    for arm in ARMS.values():
        config = configured(QUICKSTART, None, arm.settings)
        assert (config.rollout.max_lag == 0) == (arm.is_synchronous or arm.name == "P2")
        assert config.algorithm.drops_equal_rewards == arm.replaces


@pytest.mark.slow
@pytest.mark.engine
async def test_a_run_of_an_arm_is_one_record(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(
        "name: small\nenv: {target: ModMath-v0}\n"
        f"model: {{path: {tiny_model_dir}, dtype: float32}}\n"
        "rollout: {groups_per_step: 2, group_size: 2, max_turn_tokens: 32}\n"
        "eval: {num_tasks: 2, samples_per_task: 1}\n"
    )
    cell = Cell(arm="S2", sigma=1.0, mean_wait_s=5000.0, seed=0, num_steps=2)
    async with staged(config, None) as stage:
        record = await measured(stage, cell, config_path=config, calls=1.0, keep_every=1)
        held_out = await scores_of(stage, record.pop("kept"))
    assert [step["version"] for step in record["steps"]] == [1, 2]
    assert [step["groups_trained"] for step in record["steps"]] == [2, 4]
    first, second = (step["at_s"] for step in record["steps"])
    assert 0 < record["steps"][0]["learner_step_s"] < first < second
    assert [(one["version"], one["episodes"]) for one in held_out] == [(1, 2), (2, 2)]
    assert record["finished_episodes"] == 8
    assert record["core_s"]["engine"] > 0
    assert record["core_s"]["learner"] > 0
    assert json.loads(json.dumps(record))["arm"] == "S2"
    assert os.sched_getaffinity(0) == EVERY_CORE  # nothing stays on the one core of a split arm
