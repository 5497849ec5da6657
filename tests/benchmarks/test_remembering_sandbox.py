"""Programs of a study are executed once, and only where a second execution must give the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.remembering_sandbox import RememberingSandbox, is_repeatable
from sandbox.client import SandboxClient
from sandbox.protocol import ExecResult


@pytest.fixture
async def sandbox() -> AsyncIterator[RememberingSandbox]:
    async with SandboxClient.embedded(slots=2) as client:
        token = client._headers["Authorization"].removeprefix("Bearer ")
        remembering = RememberingSandbox(client.url, token, check_every=3)
        async with remembering:
            yield remembering


async def texts(sandbox: RememberingSandbox, *programs: str) -> list[str]:
    session = await sandbox.open_session()
    try:
        return [(await session.exec(program)).to_text() for program in programs]
    finally:
        await session.close()


async def test_a_program_is_executed_once_after_the_same_programs(sandbox: RememberingSandbox) -> None:
    assert await texts(sandbox, "x = 6", "print(x * 7)") == ["(no output)", "42"]
    assert sandbox.num_executed == 2
    assert await texts(sandbox, "x = 6", "print(x * 7)") == ["(no output)", "42"]
    assert sandbox.num_executed == 2
    assert await texts(sandbox, "x = 7", "print(x * 7)") == ["(no output)", "49"]  # another history
    assert sandbox.num_executed == 4
    assert await texts(sandbox, "x = 6", "print(x * 9)") == ["(no output)", "54"]  # x = 6 again, in a real interpreter
    assert sandbox.num_executed == 6


async def test_sessions_at_once_execute_a_program_once(sandbox: RememberingSandbox) -> None:
    found = await asyncio.gather(*[texts(sandbox, "print(2**70)") for _ in range(2)])
    assert found == [["1180591620717411303424"]] * 2
    assert sandbox.num_executed == 1


async def test_what_may_differ_is_always_executed(sandbox: RememberingSandbox) -> None:
    program = "import time; print(time.time_ns())"
    first, second = await texts(sandbox, program), await texts(sandbox, program, "print(1)")
    assert first != second[:1]
    assert sandbox.num_executed == 3  # and so is all that follows it in its session


async def test_a_wrong_memory_is_found(sandbox: RememberingSandbox) -> None:
    await texts(sandbox, "print(1)")
    promise: asyncio.Future[ExecResult | None] = asyncio.get_running_loop().create_future()
    promise.set_result(ExecResult(status="ok", stdout="2"))
    sandbox.known[("print(1)",)] = promise
    with pytest.raises(RuntimeError, match="gave '1', not '2'"):
        for _ in range(3):
            await texts(sandbox, "print(1)")


@pytest.mark.parametrize(
    ("code", "repeats"),
    [
        ("import math\nprint(math.lcm(4, 6))", True),
        ("import math, random", False),
        ("import mathutils", False),
        ("print({1, 2})", False),
        ("print(id(3))", False),
        ("while True: pass", False),
        ("print(sum(range(9)))", True),
    ],
)
def test_what_is_repeatable(code: str, repeats: bool) -> None:
    assert is_repeatable(code, ExecResult(status="ok", stdout="1")) is repeats


def test_a_program_that_was_stopped_is_not_remembered() -> None:
    assert not is_repeatable("print(9**9**9)", ExecResult(status="timeout"))
    assert not is_repeatable("print(print)", ExecResult(status="ok", stdout="<function f at 0x7f>"))


async def test_limits_of_a_session_are_refused(sandbox: RememberingSandbox) -> None:
    with pytest.raises(ValueError, match="default limits only"):
        await sandbox.open_session(ttl_s=5.0)
