"""How many finished groups one orchestrator takes from rollout workers, in a process of its own.

Processes that have joined as workers send groups that are ready, as fast as the orchestrator hands out numbers. It
decodes and checks each, and writes it to a journal, as in a run. Its event loop can use one core.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.buffer.journal import Journal
from agentrl.engine.base import EngineState
from agentrl.supervision.serving import serving
from agentrl.testing import completion, group, trajectory
from agentrl.types import Task, TrajectoryGroup, Turn
from agentrl.workers.api import create_app
from agentrl.workers.client import OrchestratorLink
from agentrl.workers.dispatcher import Dispatcher, Limits
from agentrl.workers.records import Play, Report, Result, RunInfo, encode
from benchmarks import reporting
from benchmarks.rollout_meter import Meter

TOKEN = "benchmark"
GROUP_SIZE = 8
NUM_TOKENS = 950
NUM_PROCESSES = 2
WARM_UP_S = 1.0


class NoEngines:
    """The groups are ready: nobody generates."""

    def states(self) -> tuple[EngineState, ...]:
        """See SharedEngines."""
        return ()

    async def check(self, index: int) -> None:
        """See SharedEngines."""


def ready_group(num_tokens: int = NUM_TOKENS) -> TrajectoryGroup:
    """A group whose episodes have one turn of so many tokens."""
    ids, logprobs = [1000 + i % 5000 for i in range(num_tokens)], [-0.001 * (i % 977) for i in range(num_tokens)]
    turn = Turn(observation_ids=(1,), completion=completion(ids, logprobs))
    return group(0, [trajectory(f"0-{index}", [turn], reward=float(index % 2)) for index in range(GROUP_SIZE)])


async def feed(url: str, num_workers: int) -> None:
    """Be so many workers that have every group ready, until the run is over."""
    ready = ready_group()
    async with OrchestratorLink(url, token=TOKEN, gone_after_s=1.0) as link, asyncio.TaskGroup() as work:
        for number in range(num_workers):
            work.create_task(_feed_as(link, f"{os.getpid()}-{number}", ready))


async def _feed_as(link: OrchestratorLink, name: str, ready: TrajectoryGroup) -> None:
    lease, revision = await link.join(name), -1
    while True:
        orders = await link.orders(Report(lease=lease, revision=revision))
        revision = orders.revision
        for assignment in orders.assignments:
            mine = replace(ready, group_id=assignment.play.group_id)
            await link.result(Result(lease=lease, play=assignment.play, group=mine))


@contextmanager
def _feeders(url: str, num_workers: int) -> Iterator[None]:
    with ExitStack() as stack:
        shares = [len(range(index, num_workers, NUM_PROCESSES)) for index in range(NUM_PROCESSES)]
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.rollout_taken", url, str(share)],
                    cwd=reporting.ROOT,
                    stderr=subprocess.DEVNULL,
                )
            )
            for share in shares
            if share
        ]
        try:
            yield
        finally:
            for process in started:
                process.terminate()


async def taken(num_workers: int, *, seconds: float, journal: Journal | None) -> dict[str, float]:
    """What the orchestrator took from so many workers, and what that cost it."""
    dispatcher = Dispatcher(
        NoEngines(),
        Limits(max_episodes=2 * GROUP_SIZE, timeout_s=60, max_attempts=3),
        group_sizes={"train": GROUP_SIZE},
    )
    app = create_app(dispatcher, RunInfo(config={}, model_path="m", sandbox_url="http://127.0.0.1:9"), token=TOKEN)
    numbers, num_taken = itertools.count(), 0

    async def keep_asking() -> None:
        nonlocal num_taken
        engine: Any = None
        for number in numbers:
            task = Task(id=f"t{number}", prompt="?")
            if journal is not None:
                journal.issued(number, task)
            finished = await dispatcher.play_group(engine, number, task, kind="train")
            if journal is not None:
                journal.ready(finished)
            num_taken += 1

    async with serving(app, host="127.0.0.1", port=0) as url, dispatcher.running():
        with _feeders(url, num_workers):
            async with asyncio.timeout(60):
                while len(dispatcher.names) < num_workers:
                    await asyncio.sleep(0.05)
            slots = [asyncio.create_task(keep_asking()) for _ in range(2 * num_workers)]
            await asyncio.sleep(WARM_UP_S)
            before = num_taken
            async with Meter() as meter:
                await asyncio.sleep(seconds)
            num_groups = num_taken - before
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
    own = meter.report(num_episodes=num_groups, num_turns=num_groups, mean_reward=0.0)
    return own | {"groups_a_second": num_groups / own["wall_s"], "core": own["cpu_s"] / own["wall_s"]}


def table(*, seconds: float) -> str:
    """By number of workers, with and without the journal."""
    size = len(encode(Result(lease="x", play=Play(kind="train", group_id=0, number=0), group=ready_group())))
    rows = []
    for has_journal in (True, False):
        for num_workers in (1, 10, 100):
            with tempfile.TemporaryDirectory() as folder:
                journal = Journal(Path(folder) / "journal.sqlite") if has_journal else None
                found = asyncio.run(taken(num_workers, seconds=seconds, journal=journal))
                if journal is not None:
                    journal.close()
            rows.append(
                [
                    f"{num_workers}",
                    "journal" if has_journal else "no journal",
                    f"{found['groups_a_second']:.0f}",
                    f"{found['groups_a_second'] * size / 1e6:.1f}",
                    f"{found['cpu_ms_a_turn']:.2f}",
                    f"{100 * found['core']:.0f} %",
                    f"{found['late_p99_ms']:.0f}",
                ]
            )
    names = ["workers", "", "groups a second", "MB a second", "CPU ms a group", "of one core", "event loop late p99 ms"]
    head = f"A group: {GROUP_SIZE} episodes of {NUM_TOKENS} tokens, {size / 1e3:.0f} kB as it is sent.\n\n"
    return head + reporting.table(names, rows)


if __name__ == "__main__":
    asyncio.run(feed(sys.argv[1], int(sys.argv[2])))
