"""Plays an AgentEnv: the agent brings its own loop, and a chat session answers and records its calls.

Independent of HTTP, beyond the address that the agent is given. Each conversation of the session is one segment.
"""

from __future__ import annotations

import asyncio
import inspect
import logging

from agentrl.chat.proxy import ChatProxy
from agentrl.chat.session import ChatSession
from agentrl.env import attributed
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import ConfigError, EnvError
from agentrl.rollouts.episode import PlayedEpisode
from agentrl.supervision.threads import in_thread
from agentrl.types import StopReason, Task

log = logging.getLogger(__name__)

AGENT_END_TIMEOUT_S = 15.0
"""How long an agent may take to end after it was cancelled."""


class AgentRunner:
    """An EpisodeRunner for an AgentEnv.

    runner = AgentRunner(env, task, session, ChatProxy())
    finished = await play_episode(env, attempt, runner, config)
    """

    def __init__(self, env: AgentEnv, task: Task, session: ChatSession, proxy: ChatProxy) -> None:
        self._env = env
        self._task = task
        self._session = session
        self._proxy = proxy
        self._is_generating = False

    @property
    def has_turns(self) -> bool:
        """See EpisodeRunner."""
        return bool(self._session.records)

    @property
    def is_generating(self) -> bool:
        """See EpisodeRunner."""
        return self._is_generating

    async def begin(self, seed: int) -> None:
        """See EpisodeRunner: the agent does everything itself."""

    async def play(self) -> StopReason:
        """Run the agent until it ends or the engine fails; after this, and after a cancellation, it has ended."""
        async with self._proxy.session(self._session) as endpoint:
            agent = asyncio.create_task(self._run(endpoint), name=f"agent of task {self._task.id}")
            failure = asyncio.create_task(self._session.failure(), name="watch the engine")
            try:
                await asyncio.wait({agent, failure}, return_when=asyncio.FIRST_COMPLETED)
                self._session.raise_failure()
            finally:
                self._is_generating = self._session.has_calls_running
                await self._ended({agent, failure})
        if agent.cancelled():
            raise EnvError(f"{type(self._env).__name__}.run of task {self._task.id} cancelled itself")
        return self._stop_reason(agent.exception())

    def record(self) -> PlayedEpisode:
        """See EpisodeRunner."""
        session = self._session
        return PlayedEpisode(
            messages=tuple(session.messages),
            segments=tuple(session.records),
            counts={
                "calls": session.num_answers,
                "tool_calls": session.num_tool_calls,
                "completion_tokens": session.num_completion_tokens,
                "generate_s": session.generate_s,
            },
        )

    def _stop_reason(self, error: BaseException | None) -> StopReason:
        """How the agent's episode ended. Raises `error` unless a refused call caused it."""
        session, task = self._session, self._task
        if session.refusal is not None:
            if not session.records:
                reason = f"task {task.id}: {session.refusal.reason} Raise the limit or drop the task"
                raise ConfigError(reason) from error
            if isinstance(error, EnvError):
                return session.refusal.stop_reason
        if error is not None:
            raise error
        if not session.records:
            raise EnvError(
                f"the agent of task {task.id} ended without an answer from the model: does it use endpoint.base_url "
                "and endpoint.api_key?"
            )
        return StopReason.COMPLETED

    async def _run(self, endpoint: Endpoint) -> None:
        """Call `run`, in a thread where it is a plain function, and attribute its failures."""
        env, task = self._env, self._task
        name = f"{type(env).__name__}.run of task {task.id}"
        with attributed(name):
            try:
                if inspect.iscoroutinefunction(env.run):
                    await env.run(task=task, endpoint=endpoint)
                else:
                    await in_thread(lambda: env.run(task=task, endpoint=endpoint), name="agent")
            except SystemExit as error:  # ends the agent, not this process
                raise EnvError(f"{name} called sys.exit({error.code!r})") from error

    async def _ended(self, tasks: set[asyncio.Task[None]]) -> None:
        """Cancel tasks that still run and wait for their end, within a deadline: an agent may ignore a cancellation."""
        for task in tasks:
            task.cancel()
        _, hanging = await asyncio.wait(tasks, timeout=AGENT_END_TIMEOUT_S)
        if hanging:
            log.warning("%s.run did not end after its cancellation; it is abandoned", type(self._env).__name__)
        for task in tasks - hanging:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not report it
