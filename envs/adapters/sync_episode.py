"""Plays episodes of an Env class through blocking calls: one thread, one event loop, one task that plays them all.

Independent of Gymnasium and engines. One task makes all calls of an episode, because environments may rely on that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl import env as environments
from agentrl.env import Action, Env, Episode
from agentrl.tokens.tool_calls import parse_hermes
from agentrl.types import Message, StopReason, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

OpenSandbox = Callable[[], "AbstractAsyncContextManager[SandboxClient]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReply:
    """The environment's answer, and the message that it answered."""

    messages: Sequence[Message]
    said: Message | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)  # named, at the end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    """A task to start, a message to send, or neither, which ends the episode."""

    task: Task | None = None
    seed: int = 0
    text: str | None = None
    answer: Future[EnvReply] = field(default_factory=Future)


class SyncEpisode:
    """Plays one episode at a time. The thread starts with the first episode, so that a process may fork before it."""

    def __init__(self, env_class: type[Env], sandbox: OpenSandbox | None) -> None:
        self._env_class = env_class
        self._open_sandbox = sandbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: asyncio.Queue[_Request]

    def begin(self, task: Task, *, seed: int) -> EnvReply:
        """Close the previous environment and reset a new one. Raises InfraError, ConfigError."""
        return self._ask(_Request(task=task, seed=seed))

    def say(self, text: str) -> EnvReply:
        """Play one turn of the model. Raises InfraError, which ends the episode."""
        return self._ask(_Request(text=text))

    def close(self) -> None:
        """Close everything. A later `begin` starts again."""
        if self._thread is not None and self._loop is not None:
            self._ask(_Request())
            self._thread.join()
            self._thread = None

    def _ask(self, request: _Request) -> EnvReply:
        if self._loop is None:
            started: Future[None] = Future()
            self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
            self._thread.start()
            started.result()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, request)
        return request.answer.result()

    async def _serve(self, started: Future[None]) -> None:
        self._inbox, self._loop = asyncio.Queue(), asyncio.get_running_loop()
        started.set_result(None)
        request = await self._inbox.get()
        failure: Exception | None = None
        try:
            async with AsyncExitStack() as stack:
                sandbox = await stack.enter_async_context(self._open_sandbox()) if self._open_sandbox else None
                make_env = await stack.enter_async_context(environments.opened(self._env_class, sandbox=sandbox))
                while request.task is not None:
                    request = await self._play(request, make_env())
        except Exception as error:
            failure = error
        self._loop = None  # before the answer, so that the next call starts again
        if failure is None:
            request.answer.set_result(EnvReply(messages=()))
        else:
            request.answer.set_exception(failure)

    async def _play(self, request: _Request, env: Env) -> _Request:
        """Play until the episode is over, or until a request without a message ends it. Returns the next request."""
        assert request.task is not None
        running = _RunningEpisode(env, request.task)
        try:
            request.answer.set_result(await running.begin(request.seed))
            while not running.is_over:
                request = await self._inbox.get()
                if request.text is None:
                    return request
                request.answer.set_result(await running.say(request.text))
        except Exception as error:
            request.answer.set_exception(error)
        finally:
            await environments.close(env)
        return await self._inbox.get()


class _RunningEpisode:
    """One running episode."""

    def __init__(self, env: Env, task: Task) -> None:
        self._env, self._task = env, task
        self._messages: list[Message] = []
        self._num_turns = 0
        self._step_reward = 0.0
        self._counts: dict[str, float] = {}
        self.is_over = False

    async def begin(self, seed: int) -> EnvReply:
        self._messages += await environments.start(self._env, self._task, seed)
        return EnvReply(messages=tuple(self._messages))

    async def say(self, text: str) -> EnvReply:
        parsed = parse_hermes(text, id_prefix=f"call_{self._num_turns}")
        said = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        result = await environments.advance(self._env, Action(message=said, parse_errors=parsed.errors))
        self._messages += [said, *result.observation]
        self._num_turns += 1
        self._step_reward += result.reward
        environments.add_counts(self._counts, result.info)
        truncated = result.truncated or (self._num_turns >= self._env.max_turns and not result.terminated)
        reply = EnvReply(
            said=said,
            messages=tuple(result.observation),
            reward=result.reward,
            terminated=result.terminated,
            truncated=truncated,
            counts={key: value for key, value in result.info.items() if _is_count(key, value)},
        )
        self.is_over = truncated or result.terminated
        return await self._scored(reply, was_cut=not result.truncated) if self.is_over else reply

    async def _scored(self, reply: EnvReply, *, was_cut: bool) -> EnvReply:
        """The last reply, with the episode's reward minus the rewards of its steps."""
        reason = StopReason.COMPLETED if reply.terminated else StopReason.MAX_TURNS if was_cut else StopReason.TRUNCATED
        episode = Episode(
            task=self._task,
            messages=tuple(self._messages),
            stop_reason=reason,
            step_reward=self._step_reward,
            info=self._counts,
        )
        scored = await environments.scored(self._env, episode)
        rest = scored.reward - (self._step_reward - reply.reward)
        return EnvReply(
            said=reply.said,
            messages=reply.messages,
            reward=rest,
            terminated=reply.terminated,
            truncated=reply.truncated,
            counts=reply.counts,
            rewards=scored.rewards,
        )


def _is_count(key: str, value: object) -> bool:
    """Whether a value is a count. Times are not, because they differ from run to run."""
    return isinstance(value, int | float) and not key.endswith("_s")
