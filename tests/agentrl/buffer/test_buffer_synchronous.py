"""Without lag the buffer is the synchronous loop: the same batches in the same order, whichever group ends first."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.journal import Journal
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.types import Task
from tests.agentrl.buffer.buffer_model import USEFUL, USELESS, make_group

Fate = Literal["useful", "useless", "failed"]
FATES: tuple[Fate, ...] = ("useful", "useful", "useless", "failed")


def synchronous_loop(fates: list[Fate], *, groups_per_step: int, steps: int) -> list[list[int]]:
    """Tasks one after the other until enough of them are useful; then a step. Nothing else is going on."""
    tasks, batches = iter(enumerate(fates)), []
    for _ in range(steps):
        useful = (task for task, fate in tasks if fate == "useful")
        batches.append(list(itertools.islice(useful, groups_per_step)))
    return batches


@settings(max_examples=60, deadline=None)
@given(
    fates=st.lists(st.sampled_from(FATES), max_size=30),
    groups_per_step=st.integers(1, 4),
    on_stale=st.sampled_from(["drop", "requeue", "wait"]),
    seed=st.integers(0, 2**16),
)
def test_without_lag_it_is_the_synchronous_loop(
    fates: list[Fate], groups_per_step: int, on_stale: OnStale, seed: int
) -> None:
    """The same batches in the same order, whatever the order in which groups that run at once come to their ends."""
    steps, rng = 4, random.Random(seed)
    fates.extend(itertools.repeat("useful", groups_per_step * steps))

    async def play(buffer: TrajectoryBuffer, group_id: int, task: Task) -> None:
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        if (fate := fates[int(task.id)]) == "failed":
            await buffer.fail(group_id, "sandbox gone")
        else:
            rewards = USEFUL if fate == "useful" else USELESS
            await buffer.finish(make_group(group_id, task, version=buffer.version, rewards=rewards))

    async def roll(buffer: TrajectoryBuffer) -> None:
        async with asyncio.TaskGroup() as groups:
            tasks = (Task(id=str(number), prompt="?") for number in itertools.count())
            while True:
                group_id, task = await buffer.admit(lambda: (next(tasks), 0))
                groups.create_task(play(buffer, group_id, task))

    async def parts_of(buffer: TrajectoryBuffer, found: list[int]) -> None:
        while True:
            found[:] = [group.group_id for group in (await buffer.part(len(found))).groups]

    async def run() -> list[list[int]]:
        buffer = TrajectoryBuffer(
            StalenessRule(groups_per_step=groups_per_step, max_lag=0, on_stale=on_stale), journal=Journal(":memory:")
        )
        rolling, batches = asyncio.create_task(roll(buffer)), []
        for version in range(1, steps + 1):
            early: list[int] = []  # what learner.stream_groups computes before the batch is whole
            watching = asyncio.create_task(parts_of(buffer, early))
            batch = await buffer.take()
            watching.cancel()
            batches.append([int(group.task.id) for group in batch.groups])
            assert len(early) < groups_per_step and set(early) < {group.group_id for group in batch.groups}
            await asyncio.sleep(0)
            await buffer.commit(version)
        rolling.cancel()
        return batches

    assert asyncio.run(run()) == synchronous_loop(fates, groups_per_step=groups_per_step, steps=steps)
