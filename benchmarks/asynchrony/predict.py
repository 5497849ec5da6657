"""What every cell should come to, written before it is measured.

    python -m benchmarks.asynchrony predict      # reads calibration.json, writes predictions.json

Two predictions a cell. `formula_step_s` is a closed form, with the expected longest episode by Monte Carlo over the
waits of the real tasks (None where there is no closed form: tail batching, partial rollouts, drained updates):

    synchronous     max(E[longest], work / cores) + train + sync, where `longest` is that of the batch, and with
                    replacement the longest of N chains, each of which plays groups until one is useful
    streaming       the same with train / N
    lag at most k   max(train, (train + work) / cores, (E[longest of a group] / useful + train + sync) / (k + 1)): the
                    learner, the cores, and N (k + 1) slots that each hold a group until it is trained (Little's law)

`step_s` is simulation.py's, in which cores are shared and groups overtake each other. `limits` has the ratio that a
learner which never waits would have to one that always does: S = (E[longest of the batch] + train + sync) /
max(train + sync, work / cores).

Time to the target is the time until `useful_to_target` useful groups are trained, as if no rule learned more from a
group than another, and stale groups taught as much as fresh ones: what differs from it was the learning.
"""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.asynchrony.arms import ARMS, SIGMAS, Arm
from benchmarks.asynchrony.costs import GROUPS, MEMBERS, Costs, has_equal_rewards, members_of
from benchmarks.asynchrony.simulation import Outcome, Policy
from benchmarks.asynchrony.simulation import simulate as simulated
from envs.modmath import ModMath

FOLDER = Path(__file__).parent
CALIBRATION, PREDICTIONS = FOLDER / "calibration.json", FOLDER / "predictions.json"
SEEDS, STEPS, WARM_UP = range(4), 32, 8
USEFUL_TO_TARGET = 96
"""Groups with unequal rewards until 0.8 of the held-out tasks are solved: 12 steps of the quickstart at lag 2."""
FORMULA_STEPS = 200
"""Batches of which the longest episodes are averaged."""


def longest_of(costs: Costs, *, sigma: float, seed: int) -> Iterator[tuple[str, float]]:
    """Task by task, the seconds of a group's longest episode: its waits, and its computing as if it were alone."""
    for task in ModMath.tasks("train", seed=seed):
        members = members_of(task.id, costs, sigma=sigma)
        yield task.id, max(map(sum, members)) + costs.episode_alone_s


def longest_step_s(costs: Costs, *, sigma: float, seed: int, replaces_equal: bool, num_steps: int) -> float:
    """Mean seconds until GROUPS groups that start together are there; with replacement, GROUPS useful ones."""
    groups = longest_of(costs, sigma=sigma, seed=seed)
    steps = []
    for _ in range(num_steps):
        slots = [(seconds, task_id) for task_id, seconds in islice(groups, GROUPS)]
        heapq.heapify(slots)
        end_s = 0.0
        while slots:
            end_s, task_id = heapq.heappop(slots)
            if replaces_equal and has_equal_rewards(task_id, costs):
                task_id, seconds = next(groups)
                heapq.heappush(slots, (end_s + seconds, task_id))
        steps.append(end_s)
    return statistics.fmean(steps)


def formula_step_s(
    policy: Policy, costs: Costs, *, sigma: float, seed: int = 0, num_steps: int = FORMULA_STEPS
) -> float | None:
    """Seconds a step by the closed form of the module; None where there is none."""
    if policy.is_tail_batched or policy.is_drained or policy.oversample > 1:
        return None
    train_s = costs.learner_step_one_core_s / costs.learner_cores(1 if policy.is_split else policy.learner_threads)
    plays = 1 / (1 - costs.equal_share) if policy.replaces_equal else 1.0
    work_s = GROUPS * MEMBERS * plays * costs.episode_core_s
    if policy.max_lag == 0:
        longest_s = longest_step_s(
            costs, sigma=sigma, seed=seed, replaces_equal=policy.replaces_equal, num_steps=num_steps
        )
        rollouts_s = max(longest_s, work_s / min(costs.rollout_cores, costs.cores / (1 + policy.is_split)))
        return rollouts_s + train_s / (GROUPS if policy.streams else 1) + costs.publish_s
    group_s = statistics.fmean(
        seconds for _, seconds in islice(longest_of(costs, sigma=sigma, seed=seed), GROUPS * num_steps)
    )
    slots_s = (plays * group_s + train_s + costs.publish_s) / (policy.max_lag + 1)
    return max(train_s, (costs.learner_step_one_core_s + work_s) / costs.cores, slots_s)


def limit(costs: Costs, *, sigma: float, seed: int = 0, num_steps: int = FORMULA_STEPS) -> float:
    """S = (E[longest of the batch] + train + sync) / max(train + sync, work / cores), equal rewards not replaced."""
    longest_s = longest_step_s(costs, sigma=sigma, seed=seed, replaces_equal=False, num_steps=num_steps)
    step_s = costs.learner_step_s + costs.publish_s
    return (longest_s + step_s) / max(step_s, GROUPS * MEMBERS * costs.episode_core_s / costs.rollout_cores)


def to_target_s(outcome: Outcome, useful: float) -> float | None:
    """Seconds until so many useful groups were trained, interpolated within a step; None where they never were."""
    so_far, at_s = 0.0, 0.0
    for step, number in zip(outcome.steps, outcome.useful, strict=True):
        if so_far + number >= useful:
            return at_s + (step["at_s"] - at_s) * (useful - so_far) / number
        so_far, at_s = so_far + number, step["at_s"]
    return None


def predicted(
    arm: Arm, costs: Costs, *, sigma: float, useful: float = USEFUL_TO_TARGET, num_steps: int = STEPS
) -> dict[str, Any]:
    """One cell of the file."""
    policy = Policy.of(arm)
    outcomes = [simulated(policy, costs, sigma=sigma, seed=seed, num_steps=num_steps) for seed in SEEDS]
    steps = [step for outcome in outcomes for step in outcome.steps[WARM_UP:]]
    formula_s = formula_step_s(policy, costs, sigma=sigma, num_steps=5 * num_steps)
    seconds = [one.steps[-1]["at_s"] - one.steps[WARM_UP - 1]["at_s"] for one in outcomes]
    step_s = statistics.fmean(seconds) / (num_steps - WARM_UP)
    return {
        "arm": arm.name,
        "sigma": sigma,
        "mean_wait_s": costs.mean_wait_s,
        "step_s": round(step_s, 4),
        "formula_step_s": None if formula_s is None else round(formula_s, 4),
        "at_s": [
            round(statistics.fmean(one.steps[version]["at_s"] for one in outcomes), 3) for version in range(num_steps)
        ],
        "to_target_s": [_rounded(to_target_s(one, useful)) for one in outcomes],
        "useful_a_step": round(statistics.fmean(n for one in outcomes for n in one.useful[WARM_UP:]), 3),
        "learner_busy": round(statistics.fmean(one.learner_busy_s / one.steps[-1]["at_s"] for one in outcomes), 4),
        "lag_mean": round(statistics.fmean(step["lag_mean"] for step in steps), 4),
        "lag_max": max(step["lag_max"] for step in steps),
        "stale_share": round(
            sum(step["groups_stale"] for step in steps) / max(1, sum(step["groups_finished"] for step in steps)), 4
        ),
    }


def predictions(
    calibration: Mapping[str, Any],
    *,
    arms: Sequence[Arm] = tuple(ARMS.values()),
    sigmas: Sequence[float] = SIGMAS,
    num_steps: int = STEPS,
) -> dict[str, Any]:
    """All cells, and the control without waits."""
    useful = float(calibration.get("useful_to_target", USEFUL_TO_TARGET))
    cells, limits = [], {}
    for mean_wait_s, sigma in [*((calibration["mean_wait_s"], sigma) for sigma in sigmas), (0.0, 0.0)]:
        costs = Costs.of({**calibration, "mean_wait_s": mean_wait_s})
        limits[f"{sigma:g}" if mean_wait_s else "no wait"] = round(
            limit(costs, sigma=sigma, num_steps=5 * num_steps), 3
        )
        for arm in arms:
            cells.append(predicted(arm, costs, sigma=sigma, useful=useful, num_steps=num_steps))
    return {"useful_to_target": useful, "calibration": dict(calibration), "limits": limits, "cells": cells}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def main(calibration: Path = CALIBRATION, out: Path = PREDICTIONS) -> None:
    """Read the calibration, write the predictions. Raises SystemExit without a calibration."""
    if not calibration.exists():
        raise SystemExit(f"{calibration} is missing: run `python -m benchmarks.asynchrony calibrate` first")
    found = predictions(json.loads(calibration.read_text()))
    header = reporting.header("Predicted before the runs", {}).split("\n", 2)[2]
    out.write_text(_lines(header, found))
    print(f"wrote {out}: {len(found['cells'])} cells")
    for arm, step_s in found["calibration"].get("seconds_a_step", {}).items():
        [cell] = [cell for cell in found["cells"] if cell["arm"] == arm and not cell["mean_wait_s"]]
        print(f"{arm} without waits: {cell['step_s']:.2f} s a step predicted, {step_s:.2f} in the calibration")


def _lines(header: str, found: Mapping[str, Any]) -> str:
    """JSON with a line a cell."""
    head = json.dumps({"header": header, **{name: found[name] for name in found if name != "cells"}}, indent=1)
    cells = ",\n".join("  " + json.dumps(cell) for cell in found["cells"])
    return f'{head[:-2]},\n "cells": [\n{cells}\n ]\n}}\n'


if __name__ == "__main__":
    main()
