"""learner.stream_groups: a batch reaches the learner in parts, and is the batch that it would be without them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.journal import GroupState, Journal, Resumption
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config import Config, parse
from agentrl.engine.metered import MeteredEngine
from agentrl.errors import LearnerReplaced, RunOver
from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.testing import one_token_group
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training.learner_session import LearnerSession
from agentrl.types import Batch, StepOutput, Task
from tests.agentrl.training.whole_run import YesAndNo, make_config, obedient_learner, orchestrating, run_with

TASK = Task(id="t", prompt="?", answer="1")


class OneByOne(YesAndNo):
    """Each group of a batch finishes once the learner has the one before it; those in `endless` never do."""

    def __init__(self, tokenizer: TurnTokenizer, parts: list[Batch], *, endless: tuple[int, ...] = ()) -> None:
        super().__init__(tokenizer)
        self._parts, self._endless = parts, endless

    async def generate(self, token_ids: Any, sampling: Any, *, request_id: str, session_id: str | None = None) -> Any:
        kind, group_id = request_id.split("-")[0], int(request_id.split("-")[1])
        if kind == "train" and group_id % 3:
            while group_id in self._endless or not any(group_id - 1 in ids(part) for part in self._parts):
                await asyncio.sleep(0.001)
        return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)


def streaming(tmp_path: Path, **options: Any) -> Config:
    """Steps of three groups of four."""
    settings = make_config(tmp_path, eval_every=0, max_lag=0, groups_per_step=3, **options).model_dump()
    settings["learner"]["stream_groups"] = True
    return parse(settings, source="test")


def ids(batch: Batch) -> list[int]:
    return [group.group_id for group in batch.groups]


async def test_the_learner_gets_finished_groups_before_their_batch_is_whole(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    parts: list[Batch] = []
    summary, seen = await run_with(streaming(tmp_path, steps=3), OneByOne(tokenizer, parts), tokenizer, early=parts)
    assert summary.num_steps == 3
    assert [batch.policy_version for batch in seen] == [0, 1, 2]
    assert [sorted(ids(batch)) for batch in seen] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [(part.policy_version, ids(part), part.num_missing) for part in parts] == [
        (version, [3 * version + done], 2 - done) for version in range(3) for done in range(2)
    ]
    assert all(group.policy_version == part.policy_version for part in parts for group in part.groups)
    with closing(Journal(RunFolder.open(tmp_path / "t").journal)) as journal:
        assert journal.counts()[GroupState.TRAINED] == 9


async def test_repeated_calls_get_the_same_groups(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    parts: list[Batch] = []
    engine = OneByOne(tokenizer, parts)
    _, seen = await run_with(streaming(tmp_path, steps=3), engine, tokenizer, repeat=True, early=parts)
    found = [number for batch in seen for number in ids(batch)]
    assert sorted(found) == list(range(9))


async def test_a_learner_that_died_within_a_batch_is_given_all_of_it_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    first: list[Batch] = []
    second: list[Batch] = []
    parts: list[Batch] = []
    config, engine = streaming(tmp_path, steps=3), OneByOne(tokenizer, parts)
    async with orchestrating(config, engine, tokenizer) as (orchestrator, url), asyncio.timeout(60):
        run = asyncio.create_task(orchestrator.run())
        await obedient_learner(url, first, name="first", dies_at=2, dies_in_part=True, early=parts)
        await obedient_learner(url, second, name="second", version=1, early=parts)
        assert (await run).num_steps == 3
    assert [batch.policy_version for batch in first] == [0, 1]
    assert [batch.policy_version for batch in second] == [1, 2]
    assert sorted(ids(second[0])) == sorted(ids(first[1]))
    trained = [number for batch in (first[0], *second) for number in ids(batch)]
    assert sorted(trained) == list(range(9))
    folder = RunFolder.open(tmp_path / "t")
    with closing(Journal(folder.journal)) as journal:
        assert journal.counts()[GroupState.TRAINED] == 9
    assert [line.step for line in read(folder.metrics) if line.kind == "step"] == [1, 2, 3]


async def test_a_run_that_was_cut_off_within_a_batch_goes_on_in_a_new_process(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    """As after Ctrl-C: the groups that had finished are in the same batch, and none is played again."""
    config = streaming(tmp_path, steps=3)
    seen: list[Batch] = []
    parts: list[Batch] = []
    engine = OneByOne(tokenizer, parts)
    async with orchestrating(config, engine, tokenizer) as (orchestrator, url), asyncio.timeout(60):
        run = asyncio.create_task(orchestrator.run())
        await obedient_learner(url, seen, name="first", dies_at=1, dies_in_part=True, early=parts)
        part = parts[-1]
        parts.clear()
        run.cancel()
        await asyncio.wait({run})
    folder = RunFolder.open(tmp_path / "t")
    with closing(Journal(folder.journal)) as journal:
        counts = journal.counts()
    assert (part.policy_version, ids(part), counts[GroupState.READY]) == (1, [3], 1)
    async with orchestrating(config, engine, tokenizer, run=folder) as (again, url), asyncio.timeout(60):
        run = asyncio.create_task(again.run())
        await obedient_learner(url, seen, name="second", version=1, early=parts)
        assert (await run).num_steps == 3
    assert [sorted(ids(batch)) for batch in seen] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert seen[1].groups[0] == part.groups[0]


async def test_the_minutes_end_a_run_within_a_batch(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    """The learner that has a part of the batch is told that the run is over; the groups stay for a resume."""
    for minutes in (0.02, 0.2, 1.0):
        folder = tmp_path / str(minutes)
        settings = streaming(folder, steps=9).model_dump()
        settings["train"]["max_minutes"] = minutes
        parts: list[Batch] = []
        engine = OneByOne(tokenizer, parts, endless=(1, 2))
        summary, seen = await run_with(parse(settings, source="test"), engine, tokenizer, early=parts)
        if parts:  # a busy machine may not have played a group in the time
            break
    assert (summary.num_steps, seen, [ids(part) for part in parts]) == (0, [], [[0]])
    with closing(Journal(RunFolder.open(folder / "t").journal)) as journal:
        assert journal.counts() == {GroupState.READY: 1, GroupState.CANCELLED: 2}


async def test_without_signal_a_run_ends_within_a_batch(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    """From the fifth group on all rewards are equal. The learner that has the fourth is told that the run is over."""
    parts: list[Batch] = []

    class Fruitless(OneByOne):
        async def generate(self, token_ids: Any, sampling: Any, *, request_id: str, **options: Any) -> Any:
            if request_id.startswith("train") and int(request_id.split("-")[1]) > 3:
                while not any(ids(part) == [3] for part in parts):
                    await asyncio.sleep(0.001)
                return self.completion("no")
            return await super().generate(token_ids, sampling, request_id=request_id, **options)

    summary, seen = await run_with(streaming(tmp_path, steps=9), Fruitless(tokenizer, parts), tokenizer, early=parts)
    assert "groups each had equal rewards" in summary.note
    assert (summary.num_steps, len(seen)) == (1, 1)
    with closing(Journal(RunFolder.open(tmp_path / "t").journal)) as journal:
        assert journal.counts()[GroupState.READY] == 1


async def test_the_learners_working_time_is_without_its_waits_between_parts(tokenizer: TurnTokenizer) -> None:
    """The engine generates while the learner waits for a part, and nothing while it computes one."""
    engine = MeteredEngine(YesAndNo(tokenizer))
    session = LearnerSession(engine)
    for known, groups in enumerate([(2,), (2, 0), (2, 0, 1)]):
        asking = asyncio.create_task(session.next_batch(0, known))
        await asyncio.sleep(0)
        engine.busy.start()
        await asyncio.sleep(0.01)
        engine.busy.stop()
        await session.offer(whole(*groups, num_missing=2 - known))
        await asking
        await asyncio.sleep(0.01)
    await session.step_done(StepOutput(policy_version=1, metrics={}))
    assert engine.busy.seconds > 0.02
    assert session.overlap == 0


async def buffer_of(groups_per_step: int) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(StalenessRule(groups_per_step=groups_per_step, max_lag=0), journal=Journal(":memory:"))
    for _ in range(groups_per_step):
        await buffer.admit(lambda: (TASK, 0))
    return buffer


async def is_waiting(waiting: Awaitable[Any]) -> bool:
    try:
        await asyncio.wait_for(waiting, 0.01)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
async def test_parts_are_the_groups_in_the_order_in_which_they_finish(order: tuple[int, ...]) -> None:
    buffer = await buffer_of(3)
    assert await is_waiting(buffer.part(0))
    for number, group_id in enumerate(order[:2], start=1):
        await buffer.finish(one_token_group(group_id, task=TASK, versions=[0, 0], rewards=[0.0, 1.0]))
        part = await buffer.part(number - 1)
        assert ids(part) == list(order[:number])
        assert (part.num_missing, part.policy_version) == (3 - number, 0)
        assert await is_waiting(buffer.part(number))
    await buffer.finish(one_token_group(order[2], task=TASK, versions=[0, 0], rewards=[0.0, 1.0]))
    assert await is_waiting(buffer.part(2))  # the whole batch is `take`'s
    assert ids(await buffer.take()) == [0, 1, 2]
    assert await is_waiting(buffer.part(0))


async def test_a_group_of_equal_rewards_is_in_no_part() -> None:
    buffer = await buffer_of(2)
    await buffer.finish(one_token_group(0, task=TASK, versions=[0, 0], rewards=[1.0, 1.0]))
    assert await is_waiting(buffer.part(0))
    await buffer.finish(one_token_group(1, task=TASK, versions=[0, 0], rewards=[0.0, 1.0]))
    assert ids(await buffer.part(0)) == [1]


async def test_a_batch_from_before_a_resume_has_no_parts() -> None:
    first, second, third = (
        one_token_group(number, task=TASK, versions=[version, version], rewards=[0.0, 1.0])
        for number, version in enumerate([0, 0, 1])
    )
    resumed = Resumption(num_issued=3, batches=((first, second),), ready=(third,))
    rule = StalenessRule(groups_per_step=2, max_lag=0)
    buffer = TrajectoryBuffer(rule, journal=Journal(":memory:"), resumed=resumed)
    assert await is_waiting(buffer.part(0))
    assert ids(await buffer.take()) == [0, 1]
    assert await is_waiting(buffer.part(0))
    await buffer.stepped(1)
    await buffer.commit(1)
    assert ids(await buffer.part(0)) == [2]


def whole(*group_ids: int, num_missing: int = 0) -> Batch:
    groups = [one_token_group(number, task=TASK, versions=[0, 0], rewards=[0.0, 1.0]) for number in group_ids]
    return Batch(policy_version=0, max_lag=0, groups=tuple(groups), num_missing=num_missing)


async def test_the_batch_goes_on_where_its_parts_ended(tokenizer: TurnTokenizer) -> None:
    session = LearnerSession(MeteredEngine(YesAndNo(tokenizer)))
    await session.offer(whole(2, num_missing=3))
    assert ids(await session.next_batch(0, 0)) == [2]
    await session.offer(whole(2, 0, num_missing=2))
    assert ids(await session.next_batch(0, 0)) == [2, 0]  # the first answer was lost
    step = asyncio.create_task(session.train(whole(0, 1, 2, 3), within_s=5))
    last = await session.next_batch(0, 2)
    assert (ids(last), last.num_missing) == ([1, 3], 0)
    await session.step_done(StepOutput(policy_version=1, metrics={}))
    assert (await step).policy_version == 1


@pytest.mark.parametrize(("end", "told"), [(LearnerSession.finish, RunOver), (LearnerSession.close, LearnerReplaced)])
async def test_the_end_of_the_run_reaches_a_learner_that_has_a_part(
    tokenizer: TurnTokenizer, end: Callable[[LearnerSession], Awaitable[None]], told: type[Exception]
) -> None:
    session = LearnerSession(MeteredEngine(YesAndNo(tokenizer)))
    await session.offer(whole(2, num_missing=3))
    await session.next_batch(0, 0)
    asking = asyncio.create_task(session.next_batch(0, 1))
    await asyncio.sleep(0)
    await end(session)
    with pytest.raises(told):
        await asking
