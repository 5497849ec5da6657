"""Finds a prompt that is too long before an engine is started. Independent of engines."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence

from agentrl.config import RolloutConfig
from agentrl.env import Dialogue, Env, close
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import ConfigError, InfraError
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task

log = logging.getLogger(__name__)

NUM_COUNTED = 64
"""Tasks whose tokens are counted: those with the longest texts."""


async def refuse_long_prompts(
    tasks: Sequence[Task], *, make_env: Callable[[], Env], tokenizer: TurnTokenizer, config: RolloutConfig
) -> None:
    """Raises ConfigError when the longest prompt leaves no room for a turn, or cannot be written with the template.

    The task with the longest text is begun as in an episode, with the system message and the tools. Where only its
    first turn would be cut, a warning says so. A reset that fails is left to the episode, which is tried again.

        await refuse_long_prompts(held_out, make_env=make_env, tokenizer=tokenizer, config=config.rollout)
    """
    longest = heapq.nlargest(NUM_COUNTED, tasks, key=lambda task: len(task.prompt))
    counts = await asyncio.to_thread(lambda: {task.id: tokenizer.count(task.prompt) for task in longest})
    task = max(longest, key=lambda task: counts[task.id], default=None)
    env = make_env()
    if task is None or isinstance(env.unwrapped, AgentEnv):  # an agent writes its own prompts
        await close(env)
        return
    dialogue = Dialogue(env=env, task=task)
    try:
        async with asyncio.timeout(config.episode_timeout_s):
            await dialogue.begin(seed=0)
        turns = tokenizer.with_tool_format(config.tool_format)
        num_tokens = len(turns.first_prompt(dialogue.messages, env.tool_schemas()))
    except (InfraError, TimeoutError) as error:
        log.debug("no prompt was measured: %s", error)
        return
    finally:
        await close(env)
    added = num_tokens - counts[task.id]
    num_long = sum(is_too_long(count + added, config) for count in counts.values())
    refuse_too_long(task, num_tokens, config, num_others=max(0, num_long - 1))
    if num_tokens + config.max_turn_tokens > config.max_context:
        log.warning(
            "task %s: its prompt has %d tokens, so that a first turn of rollout.max_turn_tokens=%d is cut: raise "
            "rollout.max_context=%d to %d",
            *(task.id, num_tokens, config.max_turn_tokens, config.max_context, num_tokens + config.max_turn_tokens),
        )


def is_too_long(num_tokens: int, config: RolloutConfig) -> bool:
    """Whether a prompt leaves less room than any turn needs."""
    return num_tokens + config.min_turn_tokens > config.max_context


def refuse_too_long(task: Task, num_tokens: int, config: RolloutConfig, *, num_others: int = 0) -> None:
    """Raises ConfigError for a prompt of `num_tokens` that is too long. `num_others`: more tasks of that kind.

    refuse_too_long(task, 2040, RolloutConfig(max_context=2048))
    """
    if is_too_long(num_tokens, config):
        others = f" (as do those of {num_others} more)" if num_others else ""
        raise ConfigError(
            f"task {task.id}: its prompt has {num_tokens} tokens, system message and tools included, which leaves no "
            f"room for a turn in rollout.max_context={config.max_context}{others}. Set rollout.max_context="
            f"{num_tokens + config.max_turn_tokens} or more, so that a turn of rollout.max_turn_tokens="
            f"{config.max_turn_tokens} fits too, or leave the task out"
        )
