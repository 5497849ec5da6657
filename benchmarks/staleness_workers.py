"""100 rollout workers and one orchestrator in simulated time: when is the orchestrator the limit?

    python -m benchmarks.staleness_workers        # writes benchmarks/staleness_workers.md

The cluster of benchmarks/staleness_sim.py, with the project's own admission and its own dispatcher
(agentrl/workers/dispatcher.py). Every call of a worker keeps the orchestrator's one core for the processor time that
benchmarks/rollout_workers.md measured. `load` multiplies that time: at 100, the orchestrator is as busy as with 100
times the engines, groups and workers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import RunOver
from agentrl.testing import one_token_group
from agentrl.types import Task
from agentrl.workers import dispatcher
from agentrl.workers.dispatcher import Dispatcher, Limits
from agentrl.workers.records import Assignment, Joining, Play, Report, Result
from benchmarks import reporting, virtual_time
from benchmarks.rollout_taken import NoEngines
from benchmarks.staleness_sim import Outcome, Played, Simulation, World, row

REPORT = Path(__file__).with_suffix(".md")
RESULT_S = 0.0019
"""Processor time of a finished group, its orders and the journal included: the largest row of the report."""
ORDERS_S = 0.0006
"""Of a call for orders: at most, since the time of the whole round trip."""
MAX_LAG = 4.0
LOADS = (1, 25, 50, 100, 150, 200, 300)
PREDICTIONS = """Predicted before the first run. A group costs 1.9 ms, and the simulated cluster ends 2 to 3 a second.
100 idle workers ask 50 times a second. So the core is 3 to 4 % busy at load 1, of which polls are most. Polls alone
would fill it at a load of 25 to 30, since each idle worker asks every 2 s; groups alone at about 200.
"""


@dataclass
class Core:
    """One processor core. Counts since `begin`."""

    load: float
    busy_s: float = 0.0
    waited_s: float = 0.0
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()

    async def spend(self, seconds: float) -> None:
        """Keep the core for so long, times the load, after those who came before."""
        loop = asyncio.get_running_loop()
        came = loop.time()
        async with self._lock:
            self.waited_s += loop.time() - came
            await asyncio.sleep(seconds * self.load)
        self.busy_s += seconds * self.load
        self.num_calls += 1


class WorkedSimulation(Simulation):
    """The simulation with workers between admission and engines.

    Example: `virtual_time.run(WorkedSimulation(World(), num_workers=100, load=1.0).worked())`.
    """

    def __init__(self, world: World, *, num_workers: int, load: float) -> None:
        super().__init__(world, max_lag=MAX_LAG, rule="drop", seed=0)
        self.core = Core(load)
        self._num_workers = num_workers
        limits = Limits(max_episodes=2000, timeout_s=1e9, max_attempts=3)
        self._dispatcher = Dispatcher(NoEngines(), limits, group_sizes={"train": world.group_size})
        self._played: dict[int, Played] = {}
        self._plays: set[asyncio.Task[None]] = set()

    async def worked(self) -> tuple[Outcome, float]:
        """The outcome and all simulated seconds, warm-up included."""
        async with self._dispatcher.running(), asyncio.TaskGroup() as workers:
            for number in range(self._num_workers):
                workers.create_task(self._worker(f"w{number}", workers))
            outcome = await self.run()
            seconds = asyncio.get_running_loop().time()
            self._dispatcher.end()
            for play in self._plays:
                play.cancel()
        return outcome, seconds

    async def _play(self, group_id: int, task: Task) -> Played:
        engine: Any = None
        await self._dispatcher.play_group(engine, group_id, task, kind="train")
        return self._played.pop(group_id)

    async def _worker(self, name: str, plays: asyncio.TaskGroup) -> None:
        lease, revision, held = self._dispatcher.join(Joining(name=name)), -1, set[Play]()
        while True:
            await self.core.spend(ORDERS_S)
            try:
                orders = await self._dispatcher.orders(Report(lease=lease, revision=revision, held=tuple(held)))
            except RunOver:
                return
            revision = orders.revision
            for assignment in orders.assignments:
                held.add(assignment.play)
                self._plays.add(plays.create_task(self._one(lease, assignment, held)))

    async def _one(self, lease: str, assignment: Assignment, held: set[Play]) -> None:
        play = assignment.play
        self._played[play.group_id] = await super()._play(play.group_id, assignment.task)
        await self.core.spend(RESULT_S)
        done = one_token_group(play.group_id, versions=(0, 0))
        self._dispatcher.result(Result(lease=lease, play=play, group=done))
        held.discard(play)


def table(world: World, *, num_workers: int, loads: Sequence[float]) -> str:
    """A row a load."""
    rows = []
    for load in loads:
        began = time.perf_counter()
        simulation = WorkedSimulation(world, num_workers=num_workers, load=load)
        outcome, seconds = virtual_time.run(simulation.worked())
        found, core = row(world, outcome, max_lag=MAX_LAG, rule="drop"), simulation.core
        rows.append(
            [
                f"{load:g}",
                f"{found.steps_per_hour:.1f}",
                f"{100 * found.engines_busy:.0f} %",
                f"{100 * core.busy_s / seconds:.0f} %",
                f"{core.num_calls / seconds:.0f}",
                f"{core.waited_s / core.num_calls:.2f}",
                f"{100 * found.dropped:.1f} %",
            ]
        )
        print(rows[-1], f"({time.perf_counter() - began:.0f} s)", flush=True)
    names = ["load", "steps an hour", "engines busy", "core busy", "calls a second", "wait for the core, s", "dropped"]
    return reporting.table(names, rows)


def main() -> None:
    """Simulate and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--num-workers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=World.steps)
    parser.add_argument("--out", type=Path, default=REPORT)
    arguments = parser.parse_args()
    dispatcher.TICK_S = 10.0  # no lease ends here
    world = World(steps=arguments.steps)
    settings = {"rollout workers": arguments.num_workers, "rule": f"drop, k = {MAX_LAG:g}", "world": asdict(world)}
    head = reporting.header("One orchestrator and its rollout workers, simulated", settings)
    found = table(world, num_workers=arguments.num_workers, loads=arguments.loads)
    arguments.out.write_text("\n".join([head, PREDICTIONS, found]))


if __name__ == "__main__":
    main()
