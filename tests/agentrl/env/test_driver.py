"""What is opened for an episode or a worker is closed: cancelled at every await, after every failure, exactly once."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from agentrl.env import Episode, ToolEnv, close, make, opened, play_script, shared, start
from agentrl.env import driver as drive
from agentrl.errors import ConfigError, EnvError
from agentrl.supervision.threads import StopSignal
from agentrl.tools import ToolError, tool
from agentrl.types import Message, Task, ToolCall, user
from sandbox.client import SandboxClient, SandboxSession

TASK = Task(id="t", prompt="Go.", answer="3")


@dataclass
class Ledger:
    """Who opened what, in which task, and whether it was given back there."""

    holders: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    num_closed: int = 0

    def open(self, name: str) -> None:
        assert name not in self.holders
        self.holders[name] = asyncio.current_task()

    def close(self, name: str) -> None:
        assert self.holders.pop(name) is asyncio.current_task()
        self.num_closed += 1


@dataclass
class Board:
    """The state of one episode."""

    moves: list[str] = field(default_factory=list)


class Careful(ToolEnv):
    """Awaits everywhere, and holds two things."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.board = Board()

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        await asyncio.sleep(0)
        self.ledger.open("reset")
        await asyncio.sleep(0)
        return [user(task.prompt)], {}

    @tool
    async def move(self, where: str, task: Task) -> list[str]:
        """Move."""
        await asyncio.sleep(0)
        assert task == TASK
        if "connection" not in self.ledger.holders:
            self.ledger.open("connection")
        self.board.moves.append(where)
        return self.board.moves

    async def score(self, episode: Episode) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"correct": 1.0}

    async def close(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for name in list(self.ledger.holders):
            self.ledger.close(name)
        await asyncio.sleep(0)


def calls(name: str, **arguments: object) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name=name, arguments=arguments),))


SCRIPT = [calls("move", where="left"), calls("move", where="up"), Message(role="assistant", content="done")]


async def test_private_arguments_are_filled_in_and_kept_for_an_episode() -> None:
    episode = await play_script(Careful(), TASK, SCRIPT)
    assert [m.content for m in episode.messages if m.role == "tool"] == ['["left"]', '["left","up"]']
    assert list(Careful.tool_schemas()[0]["function"]["parameters"]["properties"]) == ["where"]


@pytest.mark.parametrize("num_cancels", [1, 2, 3])
async def test_a_cancellation_at_any_await_closes_everything(num_cancels: int) -> None:
    ended: list[str] = []
    for num_awaits in range(60):
        ledger = Ledger()
        episode = asyncio.create_task(play_script(Careful(ledger), TASK, SCRIPT))
        for _ in range(num_awaits):
            await asyncio.sleep(0)
        for _ in range(num_cancels):
            episode.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({episode})
        ended.append("cancelled" if episode.cancelled() else "done")
        assert ledger.holders == {}, f"cancelled after {num_awaits} turns of the loop"
    assert (ended[0], ended[-1]) == ("cancelled", "done")
    assert ended == sorted(ended)


async def test_a_cancelled_group_waits_for_an_episode_that_is_closing() -> None:
    closing = asyncio.Event()

    class Slow(Careful):
        async def close(self) -> None:
            closing.set()
            await asyncio.sleep(0.05)
            await super().close()

    ledger = Ledger()
    episode = asyncio.create_task(play_script(Slow(ledger), TASK, SCRIPT))
    await closing.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert ledger.num_closed == 2


async def test_a_close_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Careful):
        async def close(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(drive, "CLOSE_TIMEOUT_S", 0.05)
    ledger = Ledger()
    assert (await play_script(Hangs(ledger), TASK, SCRIPT)).reward == 1.0
    assert list(ledger.holders) == ["reset", "connection"]


async def test_an_interpreter_is_given_back_even_if_close_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Careful):
        @tool
        async def run(self, code: str, session: SandboxSession) -> str:
            """Run."""
            sessions.append(session)
            return (await session.exec(code)).to_text()

        async def close(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(drive, "CLOSE_TIMEOUT_S", 0.5)
    sessions: list[SandboxSession] = []
    async with SandboxClient.embedded() as sandbox:
        script = [calls("run", code="x = 6"), calls("run", code="print(x * 7)")]
        episode = await play_script(make(Hangs, sandbox=sandbox), TASK, script)
        assert [m.content for m in episode.messages if m.role == "tool"][1] == "42"
        assert sessions[0] is sessions[1]
        assert (await sandbox.health()).sessions == 0


class Shares(ToolEnv):
    """Each instance finds what was opened once."""

    log: list[str]

    @classmethod
    @asynccontextmanager
    async def open_shared(cls) -> AsyncIterator[dict[str, int]]:
        cls.log.append("open")
        await asyncio.sleep(0)
        yield {"answer": 3}
        cls.log.append("close")  # no `finally`: run all the same

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def look(self) -> str:
        """Look."""
        return str(self.shared["answer"])

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.messages[2].content == "3")}


async def test_shared_resources_are_opened_once_and_handed_to_every_episode() -> None:
    Shares.log = []
    async with opened(Shares) as make_env:
        script = [calls("look"), Message(role="assistant", content="")]
        episodes = await asyncio.gather(*(play_script(make_env(), TASK, script) for _ in range(3)))
        assert [episode.reward for episode in episodes] == [1.0] * 3
        assert Shares.log == ["open"]
    assert Shares.log == ["open", "close"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, asyncio.CancelledError])
async def test_shared_resources_are_closed_whatever_happens(kind: type[BaseException]) -> None:
    Shares.log = []
    with pytest.raises(kind):
        async with opened(Shares):
            raise kind
    assert Shares.log == ["open", "close"]


async def test_shared_resources_that_do_not_open_are_a_failure_of_the_infrastructure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Shares):
        @classmethod
        @asynccontextmanager
        async def open_shared(cls) -> AsyncIterator[dict[str, int]]:
            raise OSError("no index")
            yield {}

    class Late(Shares):
        @classmethod
        @asynccontextmanager
        async def open_shared(cls) -> AsyncIterator[dict[str, int]]:
            await asyncio.sleep(60)
            yield {}

    monkeypatch.setattr(shared, "OPEN_TIMEOUT_S", 0.05)
    for cls, reason in ((Broken, "open_shared: OSError: no index"), (Late, "took more than 0.05 s")):
        with pytest.raises(EnvError, match=reason):
            async with opened(cls):
                raise AssertionError("never opened")


def test_using_what_was_not_opened_says_how_to_open_it() -> None:
    with pytest.raises(ConfigError, match="make it inside `opened"):
        _ = make(Shares).shared


class Threaded(ToolEnv):
    """Plain tools, which block."""

    tool_timeout_s = 0.2
    ended = False

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    def wait(self, seconds: float, stop: StopSignal) -> str:
        """Wait."""
        self.ended = stop.wait(seconds)
        return "waited"

    @tool
    def refuse(self) -> str:
        """Refuse."""
        raise ToolError("not today")


async def test_a_plain_tool_leaves_the_loop_free_and_is_told_of_its_deadline() -> None:
    env = Threaded()
    started = time.monotonic()
    episode = asyncio.create_task(play_script(env, TASK, [calls("wait", seconds=30)]))
    num_turns = 0
    while not episode.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    with pytest.raises(EnvError, match=r"tool wait: took more than 0.2 s"):
        await episode
    assert num_turns > 5
    assert time.monotonic() - started < 5
    assert env.ended


async def test_a_cancelled_plain_tool_is_told_so() -> None:
    env = Threaded()
    episode = asyncio.create_task(play_script(env, TASK, [calls("wait", seconds=30)]))
    await asyncio.sleep(0.05)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert env.ended


async def test_a_tool_can_refuse_what_the_model_asked_for() -> None:
    env = Threaded()
    try:
        await start(env, TASK, 0)
        answer, is_error = await env._answer(ToolCall(id="c", name="refuse", arguments={}), 0)
    finally:
        await close(env)
    assert (answer, is_error) == ("Error: not today", True)


async def test_a_failure_that_nobody_waits_for_any_more_is_not_printed() -> None:
    printed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
    gate = asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise EnvError("late")

    outer = asyncio.create_task(drive.uninterrupted_close(fails()))
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.sleep(0)  # the episode has failed now, and who waits for it has not heard of it
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    del outer
    await asyncio.sleep(0)  # the loop drops its reference
    gc.collect()
    assert printed == []


def test_numbers_in_a_steps_info_are_added_up_as_what_can_be_saved() -> None:
    counts = {"moves": 1.0}
    drive.add_counts(counts, {"moves": np.int64(2), "height": np.float64(0.5), "left": float("nan"), "room": "hall"})
    assert msgspec.json.encode(counts) == b'{"moves":3.0,"height":0.5}'
