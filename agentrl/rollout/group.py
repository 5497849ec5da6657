"""G episodes of one task, each tried again when a part failed: a group is whole or is none. Knows no engine."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from agentrl.env import Episode, uninterrupted_close
from agentrl.errors import InfraError, WeightSyncError, raise_first
from agentrl.supervision.backoff import backoff_s as jittered
from agentrl.types import EpisodeRecord, Task, Trajectory, TrajectoryGroup, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at one episode."""

    episode_id: str
    number: int  # 0 is the first
    seed: int  # the same for every try

    @property
    def name(self) -> str:
        """Unique over tries: for request ids."""
        return f"{self.episode_id}-{self.number}"


def as_trajectory(episode: Episode, *, trajectory_id: str, turns: tuple[Turn, ...]) -> Trajectory:
    """A scored episode with its token record, which may be empty."""
    return Trajectory(
        id=trajectory_id,
        task_id=episode.task.id,
        turns=turns,
        messages=episode.messages,
        reward=episode.reward,
        rewards=dict(episode.rewards),
        stop_reason=episode.stop_reason,
        info=dict(episode.info),
    )


async def play_group(
    task: Task,
    play: Callable[[Attempt], Awaitable[tuple[Trajectory, ...]]],
    *,
    group_id: int,
    size: int,
    max_retries: int,
    backoff_s: float,
    seed: int,
    name: str,
) -> TrajectoryGroup:
    """Play `task` `size` times at once. An episode may come to several trajectories.

    An episode that fails for infrastructure is played again up to `max_retries` times, after about `backoff_s`, which
    doubles; then its error is raised and the other episodes are cancelled. `info["retries"]` says how often it was
    played in vain. Raises InfraError, ConfigError.
    """

    async def member(index: int) -> EpisodeRecord:
        episode_id = f"{name}-{index}"
        episode_seed = zlib.crc32(f"{seed}/{task.id}/{group_id}/{index}".encode())
        for number in range(max_retries + 1):
            try:
                played = await uninterrupted_close(
                    play(Attempt(episode_id=episode_id, number=number, seed=episode_seed))
                )
                segments = played if number == 0 else tuple(_retried(trajectory, number) for trajectory in played)
                return EpisodeRecord(id=episode_id, segments=segments)
            except WeightSyncError:
                raise
            except InfraError as error:
                if number == max_retries:
                    raise
                log.warning("episode %s failed, retry %d: %s", episode_id, number + 1, error)
                await asyncio.sleep(jittered(number, base_s=backoff_s))
        raise AssertionError("unreachable")

    try:
        async with asyncio.TaskGroup() as tg:
            members = [tg.create_task(member(index), name=f"episode {group_id}-{index}") for index in range(size)]
    except BaseExceptionGroup as group:
        raise_first(group)
    return TrajectoryGroup(group_id=group_id, task=task, episodes=tuple(m.result() for m in members))


def _retried(trajectory: Trajectory, number: int) -> Trajectory:
    return replace(trajectory, info={**trajectory.info, "retries": float(number)})
