"""Who plays which group: least busy first, leases, attempts, late results, and what workers are told of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from agentrl.engine.base import EngineState
from agentrl.engine.metered import MeteredEngine
from agentrl.engine.shared import WithSpare
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EngineError,
    InfraError,
    RunOver,
    SandboxError,
    WorkerExpired,
    WorkerLost,
)
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.testing import ScriptedEngine, one_token_group
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task, TrajectoryGroup
from agentrl.workers import dispatcher as module
from agentrl.workers.dispatcher import Dispatcher
from agentrl.workers.leases import Limits
from agentrl.workers.records import EngineFailure, Joining, Orders, Play, PlayError, Report, Result

T = TypeVar("T")

TASK = Task(id="t", prompt="?")


@dataclass
class Engines:
    """Two engines that a test changes."""

    found: list[EngineState] = field(
        default_factory=lambda: [
            EngineState(url=url, model="policy", version=0, is_open=True, is_serving=True) for url in ("a", "b")
        ]
    )
    checked: list[int] = field(default_factory=list)

    def states(self) -> tuple[EngineState, ...]:
        return tuple(self.found)

    async def check(self, index: int) -> None:
        self.checked.append(index)
        await asyncio.sleep(0.05)
        if index == 1:
            raise EngineError("it does not return")


@dataclass
class Side:
    """The dispatcher, and what a test plays with it."""

    dispatcher: Dispatcher
    engines: Engines
    engine: ScriptedEngine
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        self.tasks.append(task := asyncio.create_task(work))
        return task

    async def ask(self, *group_ids: int) -> list[asyncio.Task[TrajectoryGroup]]:
        plays = (self.dispatcher.play_group(self.engine, number, TASK, kind="train") for number in group_ids)
        found = [self.begin(play) for play in plays]
        await asyncio.sleep(0)
        return found

    async def orders(self, lease: str, *held: Play, revision: int = -1) -> Orders:
        return await self.dispatcher.orders(Report(lease=lease, held=held, revision=revision))

    async def given(self, lease: str, *held: Play) -> list[Play]:
        return [assignment.play for assignment in (await self.orders(lease, *held)).assignments]


@asynccontextmanager
async def dispatching(
    tokenizer: TurnTokenizer, *, graph: WaitGraph | None = None, **limits: float
) -> AsyncIterator[Side]:
    engines = Engines()
    settings = {"max_episodes": 8, "timeout_s": 60.0, "max_attempts": 3, **limits}
    dispatcher = Dispatcher(engines, Limits(**settings), group_sizes={"train": 4, "eval": 2}, wait_graph=graph)
    side = Side(dispatcher, engines, ScriptedEngine(tokenizer=tokenizer, script=[]))
    async with dispatcher.running():
        try:
            yield side
        finally:
            for task in side.tasks:
                task.cancel()
            await asyncio.gather(*side.tasks, return_exceptions=True)


def done(lease: str, play: Play) -> Result:
    return Result(lease=lease, play=play, group=one_token_group(play.group_id, versions=(0, 0)))


async def test_a_group_goes_to_the_least_busy_worker_up_to_the_cap(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        first, second = (side.dispatcher.join(Joining(name=name)) for name in ("w0", "w1"))
        playing = await side.ask(0, 1, 2, 3, 4)
        assert side.dispatcher.load() == {"w0": 8, "w1": 8}, "a fifth group is beyond the cap of two workers"
        plays = {lease: await side.given(lease) for lease in (first, second)}
        assert [play.group_id for play in plays[first]] == [0, 2]
        assert [play.group_id for play in plays[second]] == [1, 3]
        side.dispatcher.result(done(second, plays[second][0]))
        assert (await playing[1]).group_id == 1
        assert [play.group_id for play in await side.given(second, plays[second][1])] == [4]
        for lease, play in ((first, plays[first][0]), (first, plays[first][1]), (second, plays[second][1])):
            side.dispatcher.result(done(lease, play))
        side.dispatcher.result(done(second, Play(kind="train", group_id=4, number=4)))
        groups = await asyncio.gather(*playing)
    assert [group.group_id for group in groups] == [0, 1, 2, 3, 4]
    assert all(group.task is TASK for group in groups), "the task is the orchestrator's own"


async def test_training_and_each_held_out_set_count_their_groups_apart(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer, max_episodes=99) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        await side.ask(0)
        for name in ("a", "b"):
            play_group = side.dispatcher.of_set(name, num_plays=3)
            side.begin(play_group(side.engine, 0, TASK, kind="eval"))
        await asyncio.sleep(0)
        plays = await side.given(lease)
        assert [(play.kind, play.set_name, play.group_id) for play in plays] == [
            ("train", "", 0),
            ("eval", "a", 0),
            ("eval", "b", 0),
        ]
        assert side.dispatcher.load() == {"w": 4 + 3 + 3}
        side.dispatcher.result(done(lease, plays[2]))
        await side.tasks[2]
        assert not side.tasks[0].done() and not side.tasks[1].done()


async def test_one_task_is_measured_on_the_run_s_engines_and_on_spare_ones_at_once(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        for is_spare in (False, True):
            play_group = side.dispatcher.of_set("", num_plays=2, is_spare=is_spare)
            side.begin(play_group(side.engine, 0, TASK, kind="eval"))
        await asyncio.sleep(0)
        plays = await side.given(lease)
        assert [play.is_spare for play in plays] == [False, True]
        side.dispatcher.result(done(lease, plays[1]))
        await side.tasks[1]
        assert not side.tasks[0].done()


async def test_spare_engines_come_after_the_others_and_are_looked_at_by_their_own_client() -> None:
    training, spare = Engines(), Engines()
    both = WithSpare(training, spare)
    assert [state.is_spare for state in both.states()] == [False, False, True, True]
    await both.check(0)
    await both.check(2)
    assert (training.checked, spare.checked) == ([0], [0])


async def test_a_group_beyond_the_cap_is_played_alone(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer, max_episodes=2) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        await side.ask(0, 1)
        for number in (0, 1):
            (play,) = await side.given(lease)
            assert play.group_id == number
            side.dispatcher.result(done(lease, play))
            await asyncio.sleep(0)


async def test_orders_that_were_lost_are_given_again_and_what_nobody_awaits_is_cancelled(
    tokenizer: TurnTokenizer,
) -> None:
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        (playing,) = await side.ask(7)
        (play,) = await side.given(lease)
        assert await side.given(lease) == [play], "the first answer may not have arrived"
        assert await side.given(lease, play) == []
        playing.cancel()
        await asyncio.sleep(0.01)
        assert (await side.orders(lease, play)).cancelled == (play,)
        side.dispatcher.result(done(lease, play))  # too late, and no mistake
        assert side.dispatcher.load() == {"w": 0}
        (again,) = await side.ask(7)  # as after a learner that was replaced: what was played before does not count
        orders = await side.orders(lease, play)
        assert orders.cancelled == (play,) and orders.assignments[0].play != play
        again.cancel()


async def test_the_groups_of_a_lost_worker_are_issued_again_and_its_late_results_do_not_count(
    tokenizer: TurnTokenizer,
) -> None:
    async with dispatching(tokenizer) as side:
        lost, other = (side.dispatcher.join(Joining(name=name)) for name in ("w0", "w1"))
        playing = await side.ask(0, 1)
        (play,) = await side.given(lost)
        side.dispatcher.leave(lost, "a test ended it")
        found = {one.group_id: one for one in await side.given(other)}
        assert found[0] == replace(play, number=2) and found[1].number == 1
        with pytest.raises(WorkerExpired, match="played elsewhere"):
            side.dispatcher.result(done(lost, play))
        late = one_token_group(0, versions=(9, 9))
        side.dispatcher.result(Result(lease=other, play=play, group=late))  # of the attempt that was lost
        assert not playing[0].done() and side.dispatcher.num_refused == 2
        for one in found.values():
            side.dispatcher.result(done(other, one))
            side.dispatcher.result(done(other, one))  # repeated
        assert [group.policy_version for group in await asyncio.gather(*playing)] == [0, 0]


async def test_a_group_that_loses_worker_after_worker_fails(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer, max_attempts=2) as side:
        (playing,) = await side.ask(5)
        for number in range(2):
            side.dispatcher.leave(side.dispatcher.join(Joining(name=f"w{number}")), "out of memory")
        with pytest.raises(WorkerLost, match=r"group 5 \(task t\) lost 2 rollout workers; the last was w1: out of mem"):
            await playing


async def test_a_silent_worker_loses_its_lease_and_one_whose_connection_broke_sooner(
    tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISCONNECTED_S", 0.1)
    async with dispatching(tokenizer, timeout_s=0.6) as side:
        broken, _, alive = (side.dispatcher.join(Joining(name=name)) for name in ("broken", "silent", "alive"))
        side.dispatcher.disconnected(broken)
        for _ in range(6):
            await asyncio.sleep(0.05)
            await side.orders(alive)
        assert side.dispatcher.names == ["alive", "silent"]
        for _ in range(10):
            await asyncio.sleep(0.05)
            await side.orders(alive)
        assert side.dispatcher.names == ["alive"] and side.dispatcher.num_lost == 2


async def test_a_worker_that_is_too_busy_to_ask_for_orders_keeps_its_lease_while_its_episodes_move(
    tokenizer: TurnTokenizer,
) -> None:
    graph = WaitGraph()
    async with dispatching(tokenizer, graph=graph) as side:
        moving, still = (side.dispatcher.join(Joining(name=name)) for name in ("moving", "still"))
        for _ in range(5):
            side.dispatcher._tick(40.0)
            before = graph.snapshot().num_beats
            side.dispatcher.alive(moving)
            assert graph.snapshot().num_beats > before, "a run whose workers move is not stalled"
        assert side.dispatcher.names == ["moving"]
        with pytest.raises(WorkerExpired):
            side.dispatcher.alive(still)
        side.dispatcher._tick(61.0)
        assert side.dispatcher.names == []


async def test_a_worker_that_joins_under_the_same_name_replaces_the_first(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        first = side.dispatcher.join(Joining(name="w"))
        (playing,) = await side.ask(3)
        second = side.dispatcher.join(Joining(name="w"))
        with pytest.raises(WorkerExpired):
            await side.orders(first)
        (play,) = await side.given(second)
        assert play.number == 1
        side.dispatcher.result(done(second, play))
        await playing


async def test_a_group_is_handed_out_with_the_versions_that_the_engines_have_then(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        parked = side.begin(side.orders(lease, revision=(await side.orders(lease)).revision))
        await asyncio.sleep(0)
        side.engines.found = [replace(state, version=1) for state in side.engines.found]
        playing = await side.ask(0)  # at lag 0: admitted once the engines are proven to hold version 1
        orders = await parked
        assert [state.version for state in orders.engines] == [1, 1]
        assert [assignment.play.group_id for assignment in orders.assignments] == [0]
        playing[0].cancel()


async def test_orders_wait_for_something_to_say_and_come_at_once_when_an_engine_changes(
    tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARK_S", 0.2)
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        revision = (await side.orders(lease)).revision
        assert (await side.orders(lease, revision=revision)).revision == revision
        monkeypatch.setattr(module, "PARK_S", 60.0)
        parked = side.begin(side.orders(lease, revision=revision))
        await asyncio.sleep(0)
        side.engines.found[1] = replace(side.engines.found[1], is_open=False)
        async with asyncio.timeout(5):
            assert [state.is_open for state in (await parked).engines] == [True, False]


async def test_an_engine_is_looked_at_once_for_all_workers_that_failed_there(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        leases = [side.dispatcher.join(Joining(name=name)) for name in ("w0", "w1")]
        for index in (0, 1):
            for lease in leases:
                side.dispatcher.engine_failed(EngineFailure(lease=lease, index=index))
        side.dispatcher.engine_failed(EngineFailure(lease=leases[0], index=7))  # there is none
        await asyncio.sleep(0.2)
        side.dispatcher.engine_failed(EngineFailure(lease=leases[0], index=0))  # it failed before that look
        assert side.engines.checked == [0, 1]
        assert [state.num_checks for state in (await side.orders(leases[0])).engines] == [1, 1]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(SandboxError("gone"), SandboxError), (ConfigError("too long"), ConfigError), (KeyError("x"), AgentRLError)],
)
async def test_an_error_of_a_group_keeps_its_class_and_names_the_worker(
    tokenizer: TurnTokenizer, raised: Exception, expected: type[AgentRLError]
) -> None:
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w3"))
        (playing,) = await side.ask(0)
        (play,) = await side.given(lease)
        side.dispatcher.result(Result(lease=lease, play=play, error=PlayError.of(raised)))
        with pytest.raises(AgentRLError, match="w3") as caught:
            await playing
        assert type(caught.value) is expected


async def test_tokens_and_movements_of_workers_are_those_of_the_run(tokenizer: TurnTokenizer) -> None:
    graph = WaitGraph()
    async with dispatching(tokenizer, graph=graph) as side:
        metered = MeteredEngine(side.engine, graph)
        side.dispatcher.measure_with(metered)
        lease = side.dispatcher.join(Joining(name="w"))
        before = graph.snapshot().num_beats
        await side.dispatcher.orders(Report(lease=lease, num_tokens=5, num_beats=2, is_generating=True))
        await side.dispatcher.orders(Report(lease=lease, num_tokens=9, num_beats=2, is_generating=True))
        assert metered.num_tokens == 9 and graph.snapshot().num_beats == before + 1
        await asyncio.sleep(0.02)
        side.dispatcher.leave(lease, "it ends")
        seconds = metered.busy.seconds
        assert seconds > 0
        await asyncio.sleep(0.02)
        assert metered.busy.seconds == seconds


async def test_a_run_without_workers_ends_with_what_to_do(tokenizer: TurnTokenizer) -> None:
    with pytest.raises(InfraError, match=r"no rollout worker for .* 1 groups wait"):
        async with dispatching(tokenizer, no_worker_s=0.1) as side:
            await side.ask(0)
            await asyncio.sleep(5)


async def test_when_the_run_is_over_workers_are_told(tokenizer: TurnTokenizer) -> None:
    async with dispatching(tokenizer) as side:
        lease = side.dispatcher.join(Joining(name="w"))
        parked = side.begin(side.orders(lease, revision=(await side.orders(lease)).revision))
        await asyncio.sleep(0)
        side.dispatcher.end()
        with pytest.raises(RunOver):
            await parked
