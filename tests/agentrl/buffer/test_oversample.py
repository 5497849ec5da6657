"""APRIL at lag 0, in simulated time: a step begins with the first groups that finish, the others pause and go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from agentrl.buffer.journal import Journal
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.testing import one_token_group
from agentrl.types import Task
from benchmarks import virtual_time

LENGTHS = (1, 1, 9, 9, 20, 20, 20, 20, 20, 20)
"""Tokens of each group, in the order of admission; an engine samples one a second."""


@dataclass
class Engine:
    """Samples for every group at once, unless it is paused; all that it sampled is written down."""

    buffer: TrajectoryBuffer
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    sampled: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Of each group: second and version of every token."""

    async def clock(self) -> None:
        """A token a second for every group that is not finished. Time in which it is paused does not count."""
        while True:
            await self.runs.wait()
            await asyncio.sleep(1)
            if not self.runs.is_set():
                continue  # it was paused before this token
            for group_id, tokens in list(self.sampled.items()):
                if len(tokens) < LENGTHS[group_id]:
                    tokens.append((asyncio.get_running_loop().time(), self.version))
                    if len(tokens) == LENGTHS[group_id]:
                        versions = [tokens[0][1], tokens[-1][1]]
                        await self.buffer.finish(one_token_group(group_id, versions=versions))

    async def roll(self) -> None:
        """A group in every slot."""
        while True:
            group_id, _ = await self.buffer.admit(lambda: (Task(id="t", prompt="?"), 0))
            self.sampled[group_id] = []


@pytest.mark.parametrize("step_s", [0, 5])
def test_two_of_four_groups_make_a_step_and_no_token_is_sampled_twice(step_s: int) -> None:
    """N = 2, N' = 4, groups of 1, 1, 9, 9 s, then of 20 s: batches at 1 s, 9 s and 21 s of generation."""

    async def run() -> None:
        rule = StalenessRule(groups_per_step=2, max_lag=0, on_stale="finish", oversample=2)
        buffer = TrajectoryBuffer(rule, journal=Journal(":memory:"))
        assert buffer.num_slots == 4
        engine, loop = Engine(buffer), asyncio.get_running_loop()
        engine.runs.set()
        parts = [asyncio.create_task(engine.roll()), asyncio.create_task(engine.clock())]
        taken: list[tuple[int, ...]] = []
        pauses: list[tuple[float, float]] = []
        for version in (1, 2, 3):
            batch = await buffer.take()
            engine.runs.clear()
            began = loop.time()
            await asyncio.sleep(step_s)
            pauses.append((began, loop.time()))
            taken.append(tuple(group.group_id for group in batch.groups))
            assert batch.max_lag is None
            assert buffer.ledger().balanced()
            engine.version = version
            await buffer.commit(version)
            engine.runs.set()
        for part in parts:
            part.cancel()
        assert taken == [(0, 1), (2, 3), (4, 5)]
        assert [round(began - number * step_s) for number, (began, _) in enumerate(pauses)] == [1, 9, 21]
        assert all(len(engine.sampled[group_id]) == LENGTHS[group_id] for group_id in range(6))
        assert [version for _, version in engine.sampled[2]] == [0] + [1] * 8
        assert {version for _, version in engine.sampled[4]} == {1, 2}
        during = [at for tokens in engine.sampled.values() for at, _ in tokens]
        assert not any(begin + 0.5 < at < end - 0.5 for at in during for begin, end in pauses)
        assert buffer.ledger().dropped_stale == 0 and buffer.ledger().trained == 6

    virtual_time.run(run())
