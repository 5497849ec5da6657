"""One scripted episode before a run starts an engine, so that a broken environment costs seconds and not minutes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from agentrl.check.group_score import group_detail
from agentrl.check.limited import limiting
from agentrl.check.made_up_calls import calling
from agentrl.env import Env, attributed, checked_script, play_script
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import EnvError, ToolBroken
from agentrl.types import Message, Task

log = logging.getLogger(__name__)

MAX_CALLS = 4


async def rehearse(env_class: type[Env], make_env: Callable[[], Env], task: Task, *, limit_s: float) -> None:
    """Play one episode of `task`: its demonstration, or a call of the first tools and an answer.

    Nothing is played of an AgentEnv, which brings its own loop. A failure is tried once more. A tool that fails with
    made-up arguments is a warning in the log.

    Args:
        limit_s: deadline of each call of a method.

    Raises EnvError, with the line of the user's code; SandboxError; ConfigError.

    Example:
        await rehearse(Capitals, make_env, tasks[0], limit_s=config.rollout.episode_timeout_s)
    """
    if issubclass(env_class, AgentEnv):
        return
    make_env = limiting(make_env, limit_s, remedy="set rollout.episode_timeout_s")
    demonstration = checked_script(env_class, task)
    if demonstration:
        await _played(make_env, task, demonstration)
        return
    with attributed(f"{env_class.__name__}.phrase", method="phrase", at=env_class.phrase):
        answer = [Message(role="assistant", content=env_class.phrase("0"))]
    calls = [calling(spec) for spec in list(env_class.tools.values())[:MAX_CALLS]]
    try:
        await _played(make_env, task, [*calls, *answer])
    except ToolBroken as error:
        log.warning(
            "with made-up arguments, %s. An episode in which this happens is played again and never scored: where the "
            "model's call is at fault, raise ToolError(text)",
            error,
        )
        await _played(make_env, task, answer)


async def _played(make_env: Callable[[], Env], task: Task, script: Sequence[Message]) -> None:
    try:
        await _play_and_score(make_env, task, script)
    except EnvError as error:
        log.debug("the scripted episode failed, and is played again: %s", error)
        await _play_and_score(make_env, task, script)


async def _play_and_score(make_env: Callable[[], Env], task: Task, script: Sequence[Message]) -> None:
    env = make_env()
    episode = await play_script(env, task, script, seed=0)
    if env.scores_groups:
        await group_detail(make_env, episode)
