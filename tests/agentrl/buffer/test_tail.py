"""Tail batching at lag 0: a step begins with the first groups that finish; the others' tasks have one together."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.buffer.journal import GroupState, Journal
from agentrl.buffer.journal_format import StepState
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.testing import one_token_group
from agentrl.types import Batch, Task
from benchmarks import virtual_time

RULE = StalenessRule(groups_per_step=2, max_lag=0, oversample=2, restarts=True)
STATE = StepState(ess_guard={}, train_s=0.0)


@dataclass
class Run:
    """Plays every admitted group for as long as its task takes, and makes steps of 5 s."""

    buffer: TrajectoryBuffer
    seconds: Sequence[float]
    """Of each task, in the order in which tasks are drawn."""
    first: int = 0
    """Tasks drawn before."""
    playing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    began_at: list[float] = field(default_factory=list)
    """When each batch was full."""

    def draw(self) -> tuple[Task, int]:
        self.first += 1
        return Task(id=str(self.first - 1), prompt="?"), self.first

    async def play(self, group_id: int, task: Task) -> None:
        version = self.buffer.version
        await asyncio.sleep(self.seconds[int(task.id) % len(self.seconds)])
        assert self.buffer.version == version, "a group went on under other weights"
        await self.buffer.finish(one_token_group(group_id, task=task, versions=(version, version)))

    async def roll(self) -> None:
        for group_id, task in (await self.buffer.caught_up()).items():
            self.playing[group_id] = asyncio.create_task(self.play(group_id, task))
        while True:
            group_id, task = await self.buffer.admit(self.draw)
            self.playing[group_id] = asyncio.create_task(self.play(group_id, task))

    async def step(self) -> Batch:
        batch = await self.buffer.take()
        self.began_at.append(asyncio.get_running_loop().time())
        for group_id in self.buffer.pop_restarted():
            self.playing[group_id].cancel()
        await asyncio.sleep(5)
        await self.buffer.commit(batch.policy_version + 1)
        assert self.buffer.ledger().balanced()
        return batch

    async def steps(self, number: int) -> list[list[str]]:
        """The tasks of so many batches."""
        rolling = asyncio.create_task(self.roll())
        batches = [await self.step() for _ in range(number)]
        await self.end(rolling)
        assert all(group.policy_version == batch.policy_version for batch in batches for group in batch.groups)
        return [[group.task.id for group in batch.groups] for batch in batches]

    async def end(self, rolling: asyncio.Task[None]) -> None:
        for task in (rolling, *self.playing.values()):
            task.cancel()
        await asyncio.gather(rolling, *self.playing.values(), return_exceptions=True)


def test_the_first_groups_make_short_steps_and_the_others_a_long_one() -> None:
    """Tasks of 1, 9, 2, 7 s: the step at 2 s has 0 and 2. The next one has 1 and 3 alone and begins 9 s later."""

    async def run() -> None:
        buffer = TrajectoryBuffer(RULE, journal=Journal(":memory:"))
        made = Run(buffer, seconds=[1, 9, 2, 7, 30, 3, 20, 4])
        assert await made.steps(4) == [["0", "2"], ["1", "3"], ["5", "7"], ["4", "6"]]
        assert made.began_at == pytest.approx([2, 2 + 5 + 9, 16 + 5 + 4, 25 + 5 + 30], abs=0.1)
        ledger = buffer.ledger()
        assert (ledger.issued, ledger.trained, ledger.restarted, ledger.dropped_stale) == (12, 8, 4, 0)

    virtual_time.run(run())


def test_every_task_is_trained_in_its_turn_however_long_it_is() -> None:
    """Three tasks of eight are slow, and a short step plays five: what it leaves out is trained within a few steps."""
    rule = StalenessRule(groups_per_step=4, max_lag=0, oversample=1.25, restarts=True)
    seconds = [1, 50, 1, 60, 1, 1, 1, 40]

    async def run() -> list[list[str]]:
        return await Run(TrajectoryBuffer(rule, journal=Journal(":memory:")), seconds=seconds).steps(60)

    batches = virtual_time.run(run())
    trained = Counter(itertools.chain(*batches))
    assert max(trained.values()) == 1
    oldest_missing = next(number for number in itertools.count() if str(number) not in trained)
    assert oldest_missing > sum(trained.values()) - 8, "no task is left behind"


@pytest.mark.parametrize("steps_before", [1, 2])
def test_a_killed_run_goes_on_with_the_same_kind_of_step(tmp_path: Path, steps_before: int) -> None:
    """Killed 1.5 s into the long second step, or into the short third one: no task is lost, and none comes twice."""
    seconds = [1, 9, 2, 7, 30, 3, 20, 4]

    async def begin() -> int:
        journal = Journal(tmp_path / "journal.sqlite")
        made = Run(TrajectoryBuffer(RULE, journal=journal), seconds=seconds)
        rolling = asyncio.create_task(made.roll())
        for version in range(steps_before):
            await made.step()
            journal.step_made(version + 1, STATE, resumable_from=version + 1)
        await asyncio.sleep(1.5)
        journal.close()
        await made.end(rolling)
        return made.first

    async def resume(first: int) -> list[list[str]]:
        journal = Journal(tmp_path / "journal.sqlite")
        resumed = journal.resume_at(steps_before)
        assert resumed.in_long_step == (steps_before == 1)
        buffer = TrajectoryBuffer(RULE, journal=journal, resumed=resumed)
        return await Run(buffer, seconds=seconds, first=first).steps(4 - steps_before)

    first = virtual_time.run(begin())
    assert virtual_time.run(resume(first)) == [["0", "2"], ["1", "3"], ["5", "7"], ["4", "6"]][steps_before:]


async def admitted(buffer: TrajectoryBuffer, tasks: list[str]) -> list[int]:
    """Ids of groups that are admitted now, with new tasks of these names where they are asked for."""
    names, ids = iter(tasks), []
    while True:
        try:
            async with asyncio.timeout(0.01):
                ids.append((await buffer.admit(lambda: (Task(id=next(names), prompt="?"), 1)))[0])
        except TimeoutError:
            return ids


async def test_nothing_is_played_while_the_learner_steps_and_late_ends_count_for_nothing() -> None:
    buffer = TrajectoryBuffer(RULE, journal=Journal(":memory:"))
    assert await admitted(buffer, list("abcdef")) == [0, 1, 2, 3]
    for group_id in (3, 1, 0):  # 0 is a group too many
        await buffer.finish(one_token_group(group_id, versions=(0, 0)))
    assert [group.group_id for group in (await buffer.take()).groups] == [0, 1]
    assert buffer.pop_restarted() == [2] and buffer.pop_restarted() == []
    assert buffer.ledger().restarted == 2  # the finished one as well: it would be too old in the next step
    assert await admitted(buffer, list("ef")) == []
    before = buffer.ledger()
    await buffer.fail(2, "the run ended", state=GroupState.CANCELLED)
    assert buffer.ledger() == before
    await buffer.commit(1)
    assert await admitted(buffer, ["never drawn"]) == [4, 5]  # the tasks of 2 and 3


async def test_a_task_that_waits_is_on_disk_also_while_the_same_row_is_played_again(tmp_path: Path) -> None:
    """A small data set comes around while one of its tasks waits. Here "c" waits and is drawn anew."""
    rule = StalenessRule(groups_per_step=2, max_lag=0, oversample=1.5, restarts=True)
    journal = Journal(tmp_path / "journal.sqlite")
    buffer = TrajectoryBuffer(rule, journal=journal)
    for group_id in (await admitted(buffer, list("abc")))[:2]:
        await buffer.finish(one_token_group(group_id, versions=(0, 0)))
    await buffer.take()
    await buffer.commit(1)
    await admitted(buffer, list("cab"))
    assert [task.id for task in journal.resume_at(1).waiting] == ["c"]
    journal.close()


async def test_a_long_step_replaces_a_group_without_signal_by_a_new_task() -> None:
    buffer = TrajectoryBuffer(RULE, journal=Journal(":memory:"))
    for group_id in await admitted(buffer, list("abcd")):
        if group_id < 2:
            await buffer.finish(one_token_group(group_id, versions=(0, 0)))
    await buffer.take()
    await buffer.commit(1)
    long = await admitted(buffer, [])
    await buffer.finish(one_token_group(long[0], versions=(1, 1), rewards=(1.0, 1.0)))
    assert len(await admitted(buffer, ["new"])) == 1


@pytest.mark.parametrize("on_stale", ["drop", "requeue", "wait"])
def test_tail_batching_never_trains_an_older_group(on_stale: OnStale) -> None:
    rule = StalenessRule(groups_per_step=2, max_lag=0, on_stale=on_stale, oversample=2, restarts=True)

    async def run() -> TrajectoryBuffer:
        buffer = TrajectoryBuffer(rule, journal=Journal(":memory:"))
        made = Run(buffer, seconds=[1, 9, 2, 7, 30])
        await made.steps(9)
        assert made.began_at[0] == pytest.approx(2, abs=0.1), "a short step waited for groups that it ends"
        return buffer

    buffer = virtual_time.run(run())
    assert rule.largest_lag == 0 and buffer.ledger().dropped_stale == 0 and buffer.ledger().trained == 18
