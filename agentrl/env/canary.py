"""Canaries: programs and answers with a known outcome, run in the real sandbox and the real grader.

A part that fails raises, and nothing is scored; but a part that answers wrongly would be trained on. Canaries detect
that when a run starts and every few steps. Independent of tokens, engines and the learner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.env import Env, play_script
from agentrl.errors import CanaryFailed, InfraError, SandboxError, boundary
from agentrl.supervision.backoff import backoff_s
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

MAX_TRIES = 3
BACKOFF_S = 0.5
TRY_LIMIT_S = 120.0
PROGRAM = ("total = sum(n * n for n in range(1000))", "import math\nprint(total, math.comb(40, 20), 'naïve ∑')")
PROGRAM_PRINTS = "332833500 137846528820 naïve ∑"
BAD_PROGRAM = "print('before')\n1 / 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A scripted episode of an environment with a known outcome.

    An environment offers them by a classmethod `canaries() -> Sequence[Canary]`: a right and a wrong answer for each
    way it grades, and a call of each tool that can break on its own.

        Canary(task=task, script=(Message(role="assistant", content="\\\\boxed{7}"),), correct=1.0)
    """

    task: Task
    script: tuple[Message, ...]  # the assistant's turns
    correct: float  # the expected reward named `correct`
    tool_texts: tuple[str, ...] = ()  # the tools' expected answers, in order


def canaries_of(env_class: type[Env]) -> Sequence[Canary]:
    """The canaries of a class; empty if it offers none."""
    offer: Callable[[], Sequence[Canary]] | None = getattr(env_class, "canaries", None)
    return () if offer is None else offer()


class Canaries:
    """All canaries of a run.

        await Canaries(env_class, make_env=make_env, sandbox=sandbox).check(when="before the first step")

    Args:
        make_env: makes an environment for one episode.
        sandbox: the service that the episodes use; None if there is none.
    """

    def __init__(self, env_class: type[Env], *, make_env: Callable[[], Env], sandbox: SandboxClient | None) -> None:
        self._canaries = canaries_of(env_class)
        self._make_env = make_env
        self._sandbox = sandbox

    async def check(self, *, when: str) -> None:
        """Run all. Raises CanaryFailed at the first wrong outcome, InfraError when a part keeps failing.

        Args:
            when: named in errors: `before the first step`.
        """
        if self._sandbox is not None:
            await self._tried(lambda: self._run_programs(when))
        for canary in self._canaries:
            await self._tried(lambda canary=canary: self._play(canary, when))  # type: ignore[misc]

    async def _tried(self, attempt: Callable[[], Awaitable[None]]) -> None:
        for number in range(MAX_TRIES):
            try:
                async with asyncio.timeout(TRY_LIMIT_S):
                    return await attempt()
            except CanaryFailed:
                raise
            except (InfraError, TimeoutError) as error:
                if number == MAX_TRIES - 1:
                    raise InfraError(f"canary: no outcome after {MAX_TRIES} attempts: {error}") from error
                log.warning("canary: attempt %d failed: %s", number + 1, error)
                await asyncio.sleep(backoff_s(number, base_s=BACKOFF_S))

    async def _run_programs(self, when: str) -> None:
        """Check that the sandbox keeps variables, returns a program's output, and reports a failing program."""
        assert self._sandbox is not None
        with boundary(SandboxError, "canary"):
            async with self._sandbox.session(seed=0) as session:
                results = [await session.exec(code) for code in (*PROGRAM, BAD_PROGRAM)]
        printed, broken = results[1].to_text(), results[2].to_text()
        if printed != PROGRAM_PRINTS:
            raise _failed(when, f"the sandbox answered {printed!r} to a program that prints {PROGRAM_PRINTS!r}")
        if "before" not in broken or "ZeroDivisionError" not in broken:
            raise _failed(when, f"the sandbox answered {broken!r} to a program that divides by zero")

    async def _play(self, canary: Canary, when: str) -> None:
        episode = await play_script(self._make_env(), canary.task, canary.script, seed=0)
        said = tuple(message.content for message in episode.messages if message.role == "tool")
        if canary.tool_texts and said != canary.tool_texts:
            raise _failed(when, f"the tools answered {list(said)} instead of {list(canary.tool_texts)}")
        correct = episode.rewards.get("correct", episode.reward)
        if correct != canary.correct:
            answer = canary.script[-1].content
            raise _failed(
                when,
                f"the grader gave {correct:g} instead of {canary.correct:g} to {answer!r} "
                f"(the gold answer is {canary.task.answer!r})",
            )


def _failed(when: str, what: str) -> CanaryFailed:
    return CanaryFailed(
        f"canary {when}: {what}. Rewards since the last good check cannot be trusted: fix the part, then resume from "
        "an earlier checkpoint"
    )
