"""Canaries pass where parts work, and stop the run where parts answer wrongly or not at all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from agentrl.env import Env, canary, make
from agentrl.env.canary import Canaries, canaries_of
from agentrl.errors import CanaryFailed, InfraError
from agentrl.supervision.backoff import backoff_s
from agentrl.tools import tool
from agentrl.types import Task
from envs.aime import Aime, AimePython
from sandbox.client import SandboxClient

one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxClient]:
    async with SandboxClient.embedded(slots=2) as client:
        yield client


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "BACKOFF_S", 0.001)


async def check(env_class: type[Env], sandbox: SandboxClient | None = None) -> None:
    await Canaries(env_class, make_env=partial(make, env_class, sandbox=sandbox), sandbox=sandbox).check(when="here")


class Integers(Aime):
    canary_answers = (("33", "033", "34"),)


class AlwaysRight(Integers):
    async def grade(self, text: str, task: Task) -> bool:
        return True


class AlwaysWrong(Integers):
    async def grade(self, text: str, task: Task) -> bool:
        return False


class Faulty(Integers):
    failures = 10

    async def grade(self, text: str, task: Task) -> bool:
        type(self).failures -= 1
        if self.failures >= 0:
            raise RuntimeError("no memory")
        return await super().grade(text, task)


class FaultyTwice(Faulty):
    failures = 2


class ToolThatLies(AimePython):
    canary_answers = (("33", "033", "34"),)

    @tool
    async def python(self, code: str) -> str:
        """Run Python code."""
        return "41"


async def test_a_grader_that_knows_right_from_wrong_passes() -> None:
    await check(Integers)


@pytest.mark.parametrize(
    ("env_class", "said"),
    [
        (AlwaysRight, "gave 1 instead of 0 to '\\\\boxed{34}' (the gold answer is '33')"),
        (AlwaysWrong, "gave 0 instead of 1"),
    ],
)
async def test_a_grader_that_does_not_is_found_and_named(env_class: type[Env], said: str) -> None:
    with pytest.raises(CanaryFailed, match=re.escape(f"canary here: the grader {said}")) as caught:
        await check(env_class)
    assert "resume from an earlier checkpoint" in str(caught.value)


async def test_a_grader_that_raises_is_tried_again_and_then_given_up() -> None:
    await check(FaultyTwice)
    with pytest.raises(InfraError, match=r"no outcome after 3 attempts: .*RuntimeError: no memory"):
        await check(Faulty)


@one_loop
async def test_the_real_sandbox_and_tool_pass(sandbox: SandboxClient) -> None:
    await check(AimePython, sandbox)


@one_loop
async def test_a_tool_that_answers_wrongly_is_found(sandbox: SandboxClient) -> None:
    with pytest.raises(CanaryFailed, match=r"the tools answered \['41'\] instead of \['42'\]"):
        await check(ToolThatLies, sandbox)


@one_loop
@pytest.mark.parametrize(
    ("constant", "value", "said"),
    [
        ("PROGRAM", ("total = 1", "print(total)"), "answered '1' to a program that prints '332833500"),
        ("BAD_PROGRAM", "print('before')", "answered 'before' to a program that divides by zero"),
    ],
)
async def test_a_sandbox_that_computes_otherwise_is_found(
    sandbox: SandboxClient, monkeypatch: pytest.MonkeyPatch, constant: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(canary, constant, value)  # to the check it looks as if the sandbox had run another program
    with pytest.raises(CanaryFailed, match=f"the sandbox {said}"):
        await check(Integers, sandbox)


async def test_a_sandbox_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.client.BACKOFF_S", 0.001)
    monkeypatch.setattr("agentrl.env.canary.BACKOFF_S", 0.001)
    async with SandboxClient("http://127.0.0.1:9") as nowhere:
        with pytest.raises(InfraError, match=r"no outcome after 3 attempts: canary: SandboxGone"):
            await check(Integers, nowhere)


def test_environments_that_offer_none_have_none() -> None:
    class Plain(Env):
        async def reset(self, *, task: Task, seed: int | None = None) -> Any: ...

        async def step(self, action: Any) -> Any: ...

    assert list(canaries_of(Plain)) == []


@pytest.mark.parametrize(("attempt", "least", "most"), [(0, 0.25, 0.5), (3, 2.0, 4.0), (50, 15.0, 30.0)])
def test_waits_double_up_to_a_limit_with_jitter(attempt: int, least: float, most: float) -> None:
    waits = {backoff_s(attempt, base_s=0.5) for _ in range(50)}
    assert all(least <= wait <= most for wait in waits)
    assert len(waits) > 40
