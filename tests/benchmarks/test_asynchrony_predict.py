"""The predictions of the asynchronous benchmark: the simulated cores and runs against numbers worked by hand."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import virtual_time
from benchmarks.asynchrony import predict
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.cores import Cores
from benchmarks.asynchrony.costs import Costs, members_of
from benchmarks.asynchrony.simulation import Outcome, Policy, simulate

COSTS = Costs(
    learner_step_s=0.8,
    learner_step_one_core_s=1.2,
    publish_s=0.1,
    episode_core_s=1e-4,
    episode_alone_s=1e-3,
    rollout_cores=2.0,
    cores=2.0,
    calls=(0.0, 1.0),
    equal_share=0.35,
    mean_wait_s=1.6,
)
"""Rollouts that cost next to nothing, and one call an episode."""


def ends(work: Callable[[Cores], list[Awaitable[None]]], *, is_split: bool = False) -> list[float]:
    """When each piece of work ends on two cores, of which one rollout can use half a core."""

    async def timed(part: Awaitable[None]) -> float:
        await part
        return asyncio.get_running_loop().time()

    async def run() -> list[float]:
        cores = Cores(2.0, learner=2.0, rollouts=2.0, one_rollout=0.5, is_split=is_split)
        return list(await asyncio.gather(*map(timed, work(cores))))

    return virtual_time.run(run())


def test_one_rollout_uses_what_it_can_and_many_share() -> None:
    assert ends(lambda cores: [cores.roll(1.0)]) == pytest.approx([2.0])
    assert ends(lambda cores: [cores.roll(1.0) for _ in range(8)]) == pytest.approx([4.0] * 8)
    # Eight at a quarter of a core until the short one ends at 2 s; then seven share two cores.
    assert ends(lambda cores: [cores.roll(0.5), *(cores.roll(1.0) for _ in range(7))]) == pytest.approx(
        [2.0, *[2.0 + 0.5 / (2 / 7)] * 7]
    )


def test_learner_and_rollouts_have_half_each_where_both_want_more() -> None:
    assert ends(lambda cores: [cores.learn(2.0)]) == pytest.approx([1.0])
    assert ends(lambda cores: [cores.learn(1.0), *(cores.roll(1.0) for _ in range(4))]) == pytest.approx(
        [1.0, *[1.0 + 0.75 / 0.5] * 4]  # a quarter of a core each for a second, then half a core
    )
    assert ends(lambda cores: [cores.learn(3.0), cores.roll(1.0)]) == pytest.approx([2.0, 2.0])
    assert ends(lambda cores: [cores.learn(2.0)], is_split=True) == pytest.approx([2.0])


def test_paused_rollouts_go_on_where_they_were_and_cancelled_ones_leave_their_share() -> None:
    async def run() -> list[float]:
        cores = Cores(2.0, learner=2.0, rollouts=2.0, one_rollout=0.5, is_split=False)
        loop, first = asyncio.get_running_loop(), asyncio.create_task(cores.roll(1.0))
        others = [asyncio.create_task(cores.roll(10.0)) for _ in range(7)]
        await asyncio.sleep(1.0)
        cores.pause(True)
        await asyncio.sleep(5.0)
        cores.pause(False)
        for other in others:
            other.cancel()
        await first
        return [loop.time(), cores.rollout_core_s, cores.busy_s]

    # A quarter of a core for 1 s, then half a core for 1.5 s.
    assert virtual_time.run(run()) == pytest.approx([7.5, 2.75, 2.5])


def step_s(outcome: Outcome) -> float:
    return (outcome.steps[-1]["at_s"] - outcome.steps[3]["at_s"]) / (len(outcome.steps) - 4)


def run(name: str, costs: Costs = COSTS, *, sigma: float = 1.0, num_steps: int = 24) -> Outcome:
    return simulate(Policy.of(ARMS[name]), costs, sigma=sigma, seed=0, num_steps=num_steps)


def test_a_synchronous_step_is_wait_train_and_publication() -> None:
    # Every call waits 1.6 s, the learner has one thread, and in S3 an eighth of its step is left to do.
    assert step_s(run("S1", sigma=0.0)) == pytest.approx(1.6 + 1.2 + 0.1, abs=0.03)
    assert step_s(run("S2", sigma=0.0)) == pytest.approx(1.6 + 1.2 + 0.1, abs=0.03)
    steps = run("S3").steps
    assert step_s(run("S1")) - step_s(run("S3")) == pytest.approx(1.2 * 7 / 8, abs=0.1)
    assert all(step["lag_max"] == 0 for step in steps)


def test_with_negligible_work_the_formula_and_the_simulation_agree() -> None:
    for name in ("S1", "S1r", "S2", "S3r"):
        formula_s = predict.formula_step_s(Policy.of(ARMS[name]), COSTS, sigma=1.0, num_steps=24)
        assert simulate(Policy.of(ARMS[name]), COSTS, sigma=1.0, seed=0, num_steps=24).steps[-1]["at_s"] / 24 == (
            pytest.approx(formula_s, rel=0.03)
        )
    fast = replace(COSTS, mean_wait_s=0.01)  # the learner is never idle
    assert predict.formula_step_s(Policy.of(ARMS["A8"]), fast, sigma=1.0) == pytest.approx(1.2)
    assert step_s(run("A8", fast)) == pytest.approx(1.2, rel=0.05)


def test_replacing_equal_rewards_costs_time_and_makes_every_trained_group_useful() -> None:
    kept, replaced = run("S1"), run("S1r")
    assert step_s(replaced) > 1.3 * step_s(kept)
    assert set(replaced.useful) == {8} and statistics.fmean(kept.useful) == pytest.approx(8 * 0.65, abs=0.8)


def test_every_arm_is_simulated_as_its_config_says() -> None:
    assert Policy.of(ARMS["S1"]) == Policy(replaces_equal=False)
    assert Policy.of(ARMS["S3r"]).streams and Policy.of(ARMS["S4r"]).is_tail_batched and Policy.of(ARMS["S2"]).is_split
    assert [Policy.of(ARMS[name]).max_lag for name in ("A1", "A2", "A4", "A8", "P2off")] == [1, 2, 4, 8, 4]
    assert Policy.of(ARMS["P1"]) == Policy(max_lag=4, on_stale="finish")
    assert Policy.of(ARMS["P2"]) == Policy(oversample=2, on_stale="finish")
    assert Policy.of(ARMS["P2off"]).is_drained


def test_lags_stay_below_their_bound_except_where_nothing_bounds_them() -> None:
    for name, bound in (("S4", 0), ("A1", 1), ("P2off", 4)):
        assert max(step["lag_max"] for step in run(name, sigma=1.5).steps) <= bound
    assert max(step["lag_max"] for step in run("P1", sigma=1.5, num_steps=40).steps) > 4


def test_asynchronous_steps_are_faster_and_draining_takes_that_back() -> None:
    waited = {name: step_s(run(name)) for name in ("S1r", "S4r", "A4", "P2", "P2off")}
    assert waited["A4"] < waited["P2"] < waited["S4r"] < waited["S1r"]
    assert waited["P2off"] > 1.5 * waited["A4"]
    assert run("S4r").num_restarted > 0


def test_the_time_to_the_target_counts_useful_groups() -> None:
    outcome = Outcome(steps=[{"at_s": 2.0}, {"at_s": 3.0}, {"at_s": 5.0}], useful=[4, 0, 8])
    assert predict.to_target_s(outcome, 4) == 2.0
    assert predict.to_target_s(outcome, 6) == 3.5
    assert predict.to_target_s(outcome, 13) is None


def test_waits_have_the_mean_that_was_asked_for() -> None:
    costs = replace(COSTS, calls=(0.1, 0.5, 0.4))
    waits = [sum(one) for task in range(400) for one in members_of(f"t{task}", costs, sigma=0.5)]
    assert statistics.fmean(waits) == pytest.approx(1.6, rel=0.03)


def test_the_file_has_a_cell_for_each_arm_and_sigma_and_the_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = {
        "learner_step_s": 0.8,
        "publish_s": 0.1,
        "episode_core_s": 0.02,
        "calls_mean": 1.4,
        "equal_share": 0.3,
        "mean_wait_s": 1.6,
    }
    arms = [ARMS["S1r"], ARMS["A4"]]
    found = predict.predictions(calibration, arms=arms, sigmas=(0.0, 1.0), num_steps=9)
    assert [(cell["arm"], cell["sigma"], cell["mean_wait_s"]) for cell in found["cells"]] == [
        *(("S1r", 0.0, 1.6), ("A4", 0.0, 1.6), ("S1r", 1.0, 1.6), ("A4", 1.0, 1.6)),
        *(("S1r", 0.0, 0.0), ("A4", 0.0, 0.0)),
    ]
    assert json.loads(json.dumps(found)) == found
    assert found["limits"]["1"] > found["limits"]["0"] > found["limits"]["no wait"]
    with pytest.raises(SystemExit, match="calibrate"):
        predict.main(tmp_path / "missing.json", tmp_path / "out.json")
