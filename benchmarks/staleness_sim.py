"""The costs and effects of a lag bound: the project's own buffer in simulated time, compared with the capacity formula.

Engines with a fixed number of sequences play groups whose episodes have long-tailed lengths, correlated within a task;
a learner takes a fixed time a step. The buffer is agentrl/buffer/trajectory_buffer.py itself, driven
through hours in seconds.

    python -m benchmarks.staleness_sim --lags 0 1 2 --out benchmarks/staleness_sim.json
    python -m benchmarks.staleness_report benchmarks/staleness_sim.json

The first command adds rows to the file, so that the table can be made in pieces; the second writes table and picture.

Two rules are for k = 0. `oversample`: twice the groups of a step are played, the step begins with the first that
finish, and the engines stand still until its weights are there (`rollout.oversample: 2`, `on_stale: finish`). `tail`:
1.25 times the groups, the others are cancelled, and their tasks have a step of their own (`oversample: 1.25`,
`partial: restart`; RollPacker, arXiv 2509.21009).

The rival is the admission rule of AReaL (arXiv 2505.24298, section 5.1): a group may start while
(groups accepted and running) < (version + k + 1) * batch, and finished groups are trained in the order they finish. It
has no check at consumption, so what it trains on can be older than k: its share is a column.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.types import Task
from benchmarks import reporting, virtual_time
from benchmarks.staleness_stores import OVERSAMPLE, RULES, CapacityStore, OurStore, Rule, Store


@dataclass(frozen=True, kw_only=True)
class World:
    """Seconds and counts of the simulated cluster."""

    num_engines: int = 2400
    sequences_per_engine: int = 1
    groups_per_step: int = 128
    group_size: int = 8
    step_s: float = 60.0
    """Of the learner, publication included."""
    median_episode_s: float = 60.0
    longest_episode_s: float = 900.0
    """An episode is cut here, as rollout.max_context and episode_timeout_s do."""
    task_spread: float = 0.7
    """Standard deviation of log duration between tasks."""
    episode_spread: float = 0.7
    """The same within a task."""
    useless_share: float = 0.25
    """Groups with equal rewards: freed at once."""
    steps: int = 10
    warm_up: int = 6
    """Steps left out of the numbers; k + warm_up where k is larger."""


@dataclass(kw_only=True)
class Outcome:
    """The results of one simulated run, after its warm-up."""

    hours: float = 0.0
    learner_idle_s: float = 0.0
    engine_busy_s: float = 0.0
    lags: list[int] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    """Longest episode of each trained group."""
    dropped_s: list[float] = field(default_factory=list)
    """The same of each group that got too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report. Shares are of 1; a group's length is that of its longest episode."""

    rule: Rule
    max_lag: float
    steps_per_hour: float
    learner_idle: float
    engines_busy: float
    mean_lag: float
    largest_lag: int
    too_old: float  # share of what was trained
    dropped: float  # share of what finished with signal
    dropped_length: float | None  # mean length of the dropped ones / of all that finished with signal
    trained_length: float  # the same of the trained ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A group that the engines have played."""

    longest_s: float  # its longest episode
    version: int  # of its first token
    is_useless: bool


class Simulation:
    """One store in one world, for as many steps as it takes."""

    def __init__(self, world: World, *, max_lag: float, rule: Rule, seed: int) -> None:
        self._world = world
        self._seed = seed
        self._sequences = asyncio.Semaphore(world.num_engines * world.sequences_per_engine)
        self._store: Store = (
            CapacityStore(world.groups_per_step, max_lag=max_lag)
            if rule == "capacity"
            else OurStore(world.groups_per_step, max_lag=max_lag, rule=rule)
        )
        self._takes_turns = rule == "oversample"
        self._learner_is_idle, self._learner_steps = asyncio.Event(), asyncio.Event()
        self._learner_is_idle.set()
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._longest_s: dict[int, float] = {}
        self._warm_up = max(world.warm_up, math.ceil(max_lag) + 2)
        self._outcome = Outcome()
        self._is_counting = False

    async def run(self) -> Outcome:
        """Play until the last step."""
        rollouts = asyncio.create_task(self._roll())
        loop = asyncio.get_running_loop()
        began = 0.0
        for step in range(self._warm_up + self._world.steps):
            if step == self._warm_up:
                self._is_counting, began = True, loop.time()
                self._store.pop_stale()
            asked = loop.time()
            batch = await self._store.take()
            for group_id in self._store.pop_restarted():
                self._playing[group_id].cancel()
            if self._is_counting:
                self._outcome.learner_idle_s += loop.time() - asked
                self._outcome.lags += [lag for _, lag in batch]
                self._outcome.trained_s += [self._longest_s[group_id] for group_id, _ in batch]
            self._learner_is_idle.clear()
            self._learner_steps.set()
            await asyncio.sleep(self._world.step_s)
            await self._store.commit(self._store.version + 1)
            self._learner_steps.clear()
            self._learner_is_idle.set()
            if self._is_counting:
                self._outcome.dropped_s += [self._longest_s[group_id] for group_id in self._store.pop_stale()]
        self._outcome.hours = (loop.time() - began) / 3600
        self._is_counting = False
        rollouts.cancel()
        await asyncio.gather(rollouts, return_exceptions=True)
        return self._outcome

    async def _roll(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                group_id, task = await self._store.admit()
                self._playing[group_id] = groups.create_task(self._group(group_id, task))

    async def _group(self, group_id: int, task: Task) -> None:
        played = await self._play(group_id, task)
        self._longest_s[group_id] = played.longest_s
        await self._store.finish(group_id, version=played.version, is_useless=played.is_useless)

    async def _play(self, group_id: int, task: Task) -> Played:
        # A task asked again is as long as before, its episodes are new ones.
        world, rng = self._world, random.Random(f"{self._seed}/{group_id}")
        task_length = random.Random(f"{self._seed}/task {task.id}").gauss(0, world.task_spread)
        median_s = world.median_episode_s * math.exp(task_length)
        drawn_s = (median_s * math.exp(rng.gauss(0, world.episode_spread)) for _ in range(world.group_size))
        durations = [min(world.longest_episode_s, seconds) for seconds in drawn_s]
        is_useless = rng.random() < world.useless_share
        versions = await asyncio.gather(*(self._episode(seconds) for seconds in durations))
        return Played(longest_s=max(durations), version=min(versions), is_useless=is_useless)

    async def _episode(self, seconds: float) -> int:
        async with self._sequences:
            version, began = self._store.version, asyncio.get_running_loop().time()
            try:
                await (self._in_turn(seconds) if self._takes_turns else asyncio.sleep(seconds))
            except asyncio.CancelledError:
                seconds = asyncio.get_running_loop().time() - began
                raise
            finally:
                if self._is_counting:
                    self._outcome.engine_busy_s += seconds
            return version

    async def _in_turn(self, seconds: float) -> None:
        """So many seconds of generation; while the learner steps there is none."""
        loop = asyncio.get_running_loop()
        while seconds > 1e-3:  # less is the rounding of the clock
            await self._learner_is_idle.wait()
            began = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._learner_steps.wait()
            seconds -= loop.time() - began


def simulate(world: World, *, max_lag: float, rule: Rule, seed: int = 0) -> Outcome:
    """One run in simulated time."""
    return virtual_time.run(Simulation(world, max_lag=max_lag, rule=rule, seed=seed).run())


def row(world: World, outcome: Outcome, *, max_lag: float, rule: Rule) -> Row:
    """The report's line for one run."""
    seconds = outcome.hours * 3600
    capacity_s = seconds * world.num_engines * world.sequences_per_engine
    finished_s = outcome.trained_s + outcome.dropped_s
    return Row(
        rule=rule,
        max_lag=max_lag,
        steps_per_hour=world.steps / outcome.hours,
        learner_idle=outcome.learner_idle_s / seconds,
        engines_busy=min(1.0, outcome.engine_busy_s / capacity_s),
        mean_lag=statistics.mean(outcome.lags),
        largest_lag=max(outcome.lags),
        too_old=sum(lag > math.ceil(max_lag) for lag in outcome.lags) / len(outcome.lags),
        dropped=len(outcome.dropped_s) / len(finished_s),
        dropped_length=statistics.mean(outcome.dropped_s) / statistics.mean(finished_s) if outcome.dropped_s else None,
        trained_length=statistics.mean(outcome.trained_s) / statistics.mean(finished_s),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate; print each row, and keep it in a file where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=float, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--steps", type=int, default=World.steps)
    parser.add_argument("--engines", type=int, default=World.num_engines)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    world = World(steps=arguments.steps, num_engines=arguments.engines)
    for max_lag in arguments.lags:
        for rule in arguments.rules:
            if rule in OVERSAMPLE and max_lag:
                continue
            began = time.perf_counter()
            found = row(
                world,
                simulate(world, max_lag=max_lag, rule=rule, seed=arguments.seed),
                max_lag=max_lag,
                rule=rule,
            )
            print(found, f"({time.perf_counter() - began:.0f} s)", flush=True)
            if arguments.out:
                _keep(arguments.out, found, world, seed=arguments.seed)


def _keep(path: Path, found: Row, world: World, *, seed: int) -> None:
    """Add a row to the file, or replace it. Raises SystemExit for a file of another world."""
    settings = {"world": asdict(world), "seed": seed}
    known = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if known["settings"] != settings:
        raise SystemExit(f"{path} holds rows of other settings: {known['settings']}; name another file")
    rows = {(row["max_lag"], RULES.index(row["rule"])): row for row in [*known["rows"], asdict(found)]}
    known["head"] = reporting.header("Staleness in simulated time", {"seed": seed})
    known["rows"] = [rows[key] for key in sorted(rows)]
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
