"""AgentEnv x ChatSession -> Trajectories: somebody else's agent loop is played and scored.

Knows nothing of HTTP beyond the address it hands out. Trajectories exist only for an episode in which every part
worked; each record of its chat is one, with the reward of the whole.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from dataclasses import replace

from agentrl import env as environments
from agentrl.chat.proxy import ChatProxy
from agentrl.chat.session import ChatSession
from agentrl.env import Episode
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import ConfigError, EngineError, EnvError
from agentrl.rollout.group import as_trajectory
from agentrl.supervision.threads import in_thread
from agentrl.types import StopReason, Task, Trajectory

log = logging.getLogger(__name__)

AGENT_END_TIMEOUT_S = 15.0
"""How long an agent may take to end once it was cancelled."""


async def run_agent_episode(
    env: AgentEnv,
    task: Task,
    *,
    episode_id: str,
    session: ChatSession,
    proxy: ChatProxy,
    timeout_s: float,
) -> tuple[Trajectory, ...]:
    """Play one episode and score it; `env` is closed whatever happens.

    Returns one trajectory a record of the session, oldest first, ids `<episode>.<record>`. Raises EnvError,
    SandboxError, EngineError when a part failed; ConfigError when the first prompt does not fit.

    Args:
        timeout_s: deadline of the agent, and again of scoring.
    """
    started = time.monotonic()
    try:
        async with proxy.session(session) as endpoint:
            stop_reason = await _play(env, task, endpoint, session, timeout_s)
        episode = _episode(session, task, stop_reason, wall_s=time.monotonic() - started)
        episode = await environments.scored(env, episode, timeout_s=timeout_s)
    finally:
        await environments.close(env)
    return _trajectories(session, episode_id, episode)


async def _play(env: AgentEnv, task: Task, endpoint: Endpoint, session: ChatSession, timeout_s: float) -> StopReason:
    """Run the agent until it ends, its time is up, or the engine fails, whichever is first; it has ended after this."""
    agent = asyncio.create_task(_run(env, task, endpoint), name=f"agent of task {task.id}")
    failure = asyncio.create_task(session.failure(), name="watch the engine")
    try:
        await asyncio.wait({agent, failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_late, was_generating = not agent.done(), session.has_calls_running
        session.raise_failure()
    finally:
        await _ended(env, {agent, failure})
    if is_late:
        return _late(session, task, timeout_s, was_generating=was_generating)
    if agent.cancelled():
        raise EnvError(f"{type(env).__name__}.run of task {task.id} cancelled itself")
    return _end(session, task, agent.exception())


def _late(session: ChatSession, task: Task, timeout_s: float, *, was_generating: bool) -> StopReason:
    if session.records:
        return StopReason.TIMEOUT
    late = f"task {task.id}: no call was answered within {timeout_s:g} s"
    raise EngineError(late) if was_generating else EnvError(f"{late}: the agent asked for none")


def _end(session: ChatSession, task: Task, error: BaseException | None) -> StopReason:
    """How the episode of an agent that has ended is to be taken. Raises `error` where it was no refusal's doing."""
    if session.refusal is not None:
        if not session.records:
            raise ConfigError(f"task {task.id}: {session.refusal.reason} Raise the limit or drop the task") from error
        if isinstance(error, EnvError):
            return session.refusal.stop_reason
    if error is not None:
        raise error
    if not session.records:
        raise EnvError(
            f"the agent of task {task.id} ended without an answer from the model: does it use endpoint.base_url and "
            "endpoint.api_key?"
        )
    return StopReason.COMPLETED


async def _run(env: AgentEnv, task: Task, endpoint: Endpoint) -> None:
    """`run`, in a thread where it is a plain function; its failures attributed."""
    name = f"{type(env).__name__}.run of task {task.id}"
    with environments.attributed(name):
        try:
            if inspect.iscoroutinefunction(env.run):
                await env.run(task=task, endpoint=endpoint)
            else:
                await in_thread(lambda: env.run(task=task, endpoint=endpoint), name="agent")
        except SystemExit as error:  # the agent's end, not this process's
            raise EnvError(f"{name} called sys.exit({error.code!r})") from error


async def _ended(env: AgentEnv, tasks: set[asyncio.Task[None]]) -> None:
    """Cancel what still runs and see it end, within a deadline: an agent may swallow its cancellation."""
    for task in tasks:
        task.cancel()
    _, hanging = await asyncio.wait(tasks, timeout=AGENT_END_TIMEOUT_S)
    if hanging:
        log.warning("%s.run goes on after its cancellation; it is left behind", type(env).__name__)
    for task in tasks - hanging:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it


def _episode(session: ChatSession, task: Task, stop_reason: StopReason, *, wall_s: float) -> Episode:
    """What was played, not yet scored."""
    return Episode(
        task=task,
        messages=tuple(session.messages),
        stop_reason=stop_reason,
        info={
            "calls": session.num_answers,
            "segments": len(session.records),
            "tool_calls": session.num_tool_calls,
            "completion_tokens": session.num_completion_tokens,
            "generate_s": session.generate_s,
            "wall_s": wall_s,
        },
    )


def _trajectories(session: ChatSession, episode_id: str, episode: Episode) -> tuple[Trajectory, ...]:
    return tuple(
        replace(
            as_trajectory(episode, trajectory_id=f"{episode_id}.{number}", turns=record.turns),
            messages=record.messages,
            info={**episode.info, "turns": len(record.turns) or session.num_answers},
        )
        for number, record in enumerate(session.records)
    )
