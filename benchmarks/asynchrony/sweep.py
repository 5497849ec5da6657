"""Which runs are missing, and making them: only runs during which the machine was ours are kept.

Independent of the command line and of how a run is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from agentrl.errors import InfraError
from benchmarks.asynchrony import records, scores
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.run import Cell, measured
from benchmarks.asynchrony.stage import QUICKSTART, Stage, staged

MAX_OTHERS = 0.12
"""Share of the machine that other programs may take. The kernel and the machine's own services take up to 0.08 here."""
TRIES = 3
STEPS = {"score": 16, "speed": 8}
"""Of a synchronous arm. An asynchronous one makes as many more as it may lag: its first steps are on the first
weights."""
KEEP_EVERY = {"score": 4, "speed": 0}


def cells(given: argparse.Namespace, mean_wait_s: float) -> list[Cell]:
    """The runs that the command asks for, seed by seed."""
    found: list[Cell] = []
    for seed in given.seeds:
        of_seed = [
            Cell(
                arm=arm,
                sigma=sigma,
                mean_wait_s=mean,
                seed=seed,
                num_steps=given.steps or STEPS[given.kind] + int(ARMS[arm].settings["rollout.max_lag"]),
                kind=given.kind,
                real_sleep=given.real_sleep,
            )
            for sigma, mean in _waits(given, mean_wait_s)
            for arm in given.arms
        ]
        random.Random(f"order/{seed}").shuffle(of_seed)
        found += of_seed
    return found


def _waits(given: argparse.Namespace, mean_wait_s: float) -> list[tuple[float, float]]:
    return [(sigma, mean_wait_s) for sigma in given.sigmas] + ([(0.0, 0.0)] if given.no_wait else [])


def is_done(cell: Cell, made: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a record of the cell is there."""
    names = set(records.KEY) - {"mean_wait_s"}
    return any(
        all(record[name] == getattr(cell, name) for name in names)
        and abs(record["mean_wait_s"] - cell.mean_wait_s) < 1e-6
        for record in made
    )


async def sweep(given: argparse.Namespace, *, mean_wait_s: float, calls: float) -> None:
    """Make the runs that are missing. `calls`: of the tool, by an episode, on average. Raises AgentRLError."""
    wanted = cells(given, mean_wait_s)
    made = records.load(given.runs)
    missing = [cell for cell in wanted if not is_done(cell, made)]
    print(f"{len(missing)} of {len(wanted)} runs are missing", flush=True)
    if not missing:
        return
    async with staged(given.config or QUICKSTART, given.model) as stage:
        for number, cell in enumerate(missing):
            began = time.monotonic()
            record = await _quiet_run(stage, cell, given, calls)
            with given.runs.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"[{number + 1}/{len(missing)}] {_line(record)}, {time.monotonic() - began:.0f} s", flush=True)


async def _quiet_run(stage: Stage, cell: Cell, given: argparse.Namespace, calls: float) -> dict[str, Any]:
    """A run during which the machine was ours. Raises InfraError when there is none in TRIES tries."""
    config_path = given.config or QUICKSTART
    for _ in range(TRIES):
        await _quiet(given.max_others)
        record = await measured(stage, cell, config_path=config_path, calls=calls, keep_every=KEEP_EVERY[cell.kind])
        kept = record.pop("kept")
        real_s = record["steps"][-1]["real_s"]
        share = record["core_s"]["others"] / (real_s * (os.cpu_count() or 1))
        if share <= given.max_others:
            record["scores"] = await scores.scores_of(stage, kept)
            return {**record, "others_share": round(share, 4)}
        print(f"refused: other programs took {share:.0%} of the machine during {cell.arm}", flush=True)
    raise InfraError(f"no quiet run of {cell} in {TRIES} tries: stop the other programs, then run the command again")


async def _quiet(max_others: float) -> None:
    """Return when the machine is idle. Raises InfraError after two minutes."""
    psutil.cpu_percent()  # what follows counts from here
    for _ in range(60):
        await asyncio.sleep(2.0)
        if psutil.cpu_percent() <= 100 * max_others:
            return
    raise InfraError("the machine is busy with other programs: stop them, then run the command again (it goes on)")


def _line(record: Mapping[str, Any]) -> str:
    last = record["steps"][-1]
    reached = ", ".join(f"v{one['version']} {one['avg']:.2f}" for one in record["scores"])
    waits = f"sigma {record['sigma']:g}" if record["mean_wait_s"] else "no wait"
    return (
        f"{record['arm']:6} {waits} seed {record['seed']}: {last['at_s'] / last['version']:.2f} s a step "
        f"({last['real_s']:.0f} of {last['at_s']:.0f} s real) {reached}"
    )
