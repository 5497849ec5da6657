"""Scores what was played: one episode, or a whole group whose rewards depend on each other.

Calls `score` and `score_group` under a deadline, attributes their failures and checks what they return. Independent of
how an episode is driven.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentrl.env import places
from agentrl.env.attribution import attributed
from agentrl.env.base import STEP_REWARD, Env, Episode
from agentrl.env.returned import checked_group_rewards, checked_rewards
from agentrl.errors import EnvError


async def scored(env: Env, episode: Episode, *, timeout_s: float | None = None) -> Episode:
    """Call `score`; returns the episode with its named rewards and their weighted sum.

    Raises EnvError when it takes too long, a name is unknown to `reward_weights` or missing, or a value is no finite
    number.
    """
    inner = type(env.unwrapped)
    async with _scoring(f"{inner.__name__}.score of task {episode.task.id}", "score", inner.score, timeout_s):
        returned = await env.score(episode)
    rewards = checked_rewards(env, returned)
    reward = total_reward(env, rewards, episode.step_reward)
    if episode.step_reward:
        rewards[STEP_REWARD] = episode.step_reward
    return replace(episode, rewards=rewards, reward=reward)


async def group_scored(env: Env, episodes: Sequence[Episode], *, timeout_s: float | None = None) -> tuple[Episode, ...]:
    """Call `score_group` once; returns the episodes with its named rewards added to those of `score`. [G]

    Args:
        env: an object of its own, which plays none of the episodes.
        episodes: all of one group, each scored by `scored`.

    Raises EnvError when it takes too long, does not give rewards for each episode, a name is unknown to
    `reward_weights`, missing or given by `score` too, or a value is no finite number.

        best, other = await group_scored(make(Briefly), [first, second])
    """
    inner = type(env.unwrapped)
    what = f"{inner.__name__}.score_group of task {episodes[0].task.id}"
    async with _scoring(what, "score_group", inner.score_group, timeout_s):
        returned = await env.score_group(tuple(episodes))
    added = checked_group_rewards(env, returned, episodes)
    return tuple(_with_rewards(env, episode, more) for episode, more in zip(episodes, added, strict=True))


def total_reward(env: Env, rewards: Mapping[str, float], step_reward: float) -> float:
    """The trained reward: the weighted sum of the named rewards and of what `step` returned (weight 1 by default)."""
    weights = env.reward_weights
    named = sum(weights[key] * value for key, value in rewards.items())
    return float(named + weights.get(STEP_REWARD, 1.0) * step_reward)


def _with_rewards(env: Env, episode: Episode, more: Mapping[str, float]) -> Episode:
    rewards = {**episode.rewards, **more}
    return replace(episode, rewards=rewards, reward=episode.reward + total_reward(env, more, 0.0))


@asynccontextmanager
async def _scoring(
    what: str, method: str, function: Callable[..., Any], timeout_s: float | None
) -> AsyncIterator[None]:
    """A deadline for a scoring method, and EnvError or SandboxError for what it raises."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            with attributed(what, method=method, at=function, passing=TimeoutError):
                yield
    except TimeoutError as error:
        late = f"took more than {timeout_s:g} s" if deadline.expired() else f"TimeoutError: {error}"
        place = places.raised_at(error) or places.defined_at(function)
        raise EnvError(f"{what}: {late}{places.in_brackets(place)}") from error
