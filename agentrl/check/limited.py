"""Deadlines for an environment's methods, which name the line that waits. Independent of what is checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.check.report import Hung
from agentrl.env import Action, Env, Episode, StepResult, places
from agentrl.env.agent_env import AgentEnv
from agentrl.types import Message, Task
from agentrl.wrappers import Wrapper

_OPEN: dict[object, tuple[str, float]] = {}
"""What is called now, and the time of its deadline."""


@asynccontextmanager
async def limited(
    what: str, limit_s: float, *, at: Callable[..., Any] | None = None, remedy: str = "--timeout SECONDS"
) -> AsyncIterator[None]:
    """Raises Hung, with the line that was waiting, when the block takes longer than `limit_s`.

    Args:
        at: what is called, named where the line is not known.
        remedy: what to set where the call is slow and does not hang.

    Example:
        async with limited("Shop.reset", 8.0, at=Shop.reset):
            await env.reset(task=task)
    """
    deadline, key = asyncio.timeout(limit_s), object()
    _OPEN[key] = (what, time.monotonic() + limit_s)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        place = places.raised_at(error) or places.threads_run_at() or places.defined_at(at)
        where = f"; it waits at {place}" if place else ""
        slow = f"If it is slow and does not hang: {remedy}"
        raise Hung(f"{what} did not return within {limit_s:g} s{where}. {slow}") from error
    finally:
        del _OPEN[key]


def overdue(grace_s: float) -> str:
    """What ignores its cancellation for longer than this after its deadline; else empty. For a thread that watches."""
    now = time.monotonic()
    return next((what for what, due_s in list(_OPEN.values()) if now - due_s > grace_s), "")


class Limited(Wrapper):
    """A wrapper that gives each method a deadline.

    env = Limited(make(Capitals), limit_s=8.0)
    """

    def __init__(self, env: Env, *, limit_s: float, remedy: str = "--timeout SECONDS") -> None:
        super().__init__(env)
        self._limit_s, self._remedy = limit_s, remedy

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Env.reset."""
        async with self._limit("reset"):
            return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """See Env.step."""
        tools = ", ".join(call.name for call in action.message.tool_calls)
        async with self._limit("step", f" with a call of {tools}" if tools else ""):
            return await self.env.step(action)

    async def score(self, episode: Episode) -> dict[str, float]:
        """See Env.score."""
        async with self._limit("score"):
            return await self.env.score(episode)

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """See Env.score_group."""
        async with self._limit("score_group"):
            return await self.env.score_group(episodes)

    @property
    def scores_groups(self) -> bool:
        """Whether the inner environment does."""
        return self.env.scores_groups

    async def close(self) -> None:
        """See Env.close."""
        async with self._limit("close"):
            await self.env.close()

    @asynccontextmanager
    async def _limit(self, name: str, how: str = "") -> AsyncIterator[None]:
        inner = type(self.unwrapped)
        async with limited(
            f"{inner.__name__}.{name}{how}", self._limit_s, at=getattr(inner, name), remedy=self._remedy
        ):
            yield


def limiting(make_env: Callable[[], Env], limit_s: float, *, remedy: str = "--timeout SECONDS") -> Callable[[], Env]:
    """`make_env` with deadlines. An AgentEnv stays as it is: no script plays it."""

    def make() -> Env:
        env = make_env()
        return env if isinstance(env.unwrapped, AgentEnv) else Limited(env, limit_s=limit_s, remedy=remedy)

    return make
