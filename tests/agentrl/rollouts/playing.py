"""Episodes and groups played by token ids, as a run plays them, without a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.chat.runners import TokenRunners
from agentrl.config import RolloutConfig
from agentrl.env import Env
from agentrl.rollouts.episode import play_episode
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import Attempt, RolloutSettings
from agentrl.rollouts.token_speaker import token_runner
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task, Trajectory, TrajectoryGroup


async def play_one(
    env: Env, task: Task, *, engine: Any, tokenizer: TurnTokenizer, config: RolloutConfig, seed: int = 0, **options: Any
) -> tuple[Trajectory, ...]:
    """The segments of one episode `e`, without retries. `options`: of RolloutSettings."""
    attempt, settings = Attempt(task=task, episode_id="e", seed=seed), RolloutSettings(config=config, **options)
    runner = token_runner(env, attempt, engine, settings, tokenizer)
    return (await play_episode(env, attempt, runner, config)).record.segments


async def play_group(
    make_env: Callable[[], Env],
    task: Task,
    *,
    engine: Any,
    tokenizer: TurnTokenizer,
    config: RolloutConfig,
    size: int = 1,
    group_id: int = 0,
    **options: Any,
) -> TrajectoryGroup:
    """One training group, retried at once. `options`: of RolloutSettings."""
    settings = RolloutSettings(config=config.model_copy(update={"group_size": size}), backoff_s=0.001)
    player = GroupPlayer(make_env, {"train": replace(settings, **options)}, TokenRunners(tokenizer))
    return await player.play_group(engine, group_id, task, kind="train")
