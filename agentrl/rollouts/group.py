"""The episodes of one task, each tried again when a part failed, then scored as a group: it is complete or does not
exist.

Independent of how an episode is played: GroupPlayer is given a MakeRunner.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from agentrl.env import Env, close, group_scored, uninterrupted_close
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import InfraError, WeightSyncError, raise_first
from agentrl.rollouts.episode import EpisodeRunner, FinishedEpisode, play_episode
from agentrl.rollouts.settings import Attempt, RolloutSettings
from agentrl.run_folder import EpisodeKind
from agentrl.supervision.backoff import backoff_s
from agentrl.types import Task, TrajectoryGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
ModelT = TypeVar("ModelT")
ModelT_contra = TypeVar("ModelT_contra", contravariant=True)


class PlayGroup(Protocol[ModelT_contra]):
    """Plays one task as a group of episodes. Raises InfraError when a part failed. Example:
    `GroupPlayer.play_group`."""

    def __call__(
        self, model: ModelT_contra, group_id: int, task: Task, /, *, kind: EpisodeKind
    ) -> Awaitable[TrajectoryGroup]:
        """The finished group."""
        ...


class MakeRunner(Protocol[ModelT_contra]):
    """How episodes are played with one kind of model, such as an Engine or a ChatModel.

    runner = runners.for_env(env, attempt, engine, settings)
    """

    def for_env(self, env: Env, attempt: Attempt, model: ModelT_contra, settings: RolloutSettings) -> EpisodeRunner:
        """The environment leads the conversation."""
        ...

    def for_agent(
        self, env: AgentEnv, attempt: Attempt, model: ModelT_contra, settings: RolloutSettings
    ) -> EpisodeRunner:
        """The environment's own agent leads it."""
        ...


class GroupPlayer(Generic[ModelT]):
    """Turns tasks into groups, with everything that a run has settled. One per run.

        player = GroupPlayer(make_env, settings_of(config), TokenRunners(tokenizer))
        group = await player.play_group(engine, 7, task, kind="train")

    Args:
        make_env: a new environment for one episode.
        settings: of training groups, and of the samples of held-out tasks.
        name: of the held-out set that it plays, where there are several: part of the episodes' ids.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        settings: Mapping[EpisodeKind, RolloutSettings],
        runners: MakeRunner[ModelT],
        *,
        name: str = "",
    ) -> None:
        self._name = name
        self._make_env = make_env
        self._settings = settings
        self._runners = runners

    async def play_group(self, model: ModelT, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        """Play `task` `group_size` times at once, each in an environment of its own.

        An episode that fails for infrastructure is played again up to `max_retries` times; then its error is raised
        and the other episodes are cancelled. `info["retries"]` counts the failed attempts. With `request_seeds` an
        episode that is played again, also in another process, asks for the same tokens. Then the environment scores the
        group, where it has a `score_group`. A failure of that is tried again as often and counted likewise; the
        episodes are kept. Raises InfraError, ConfigError.
        """
        settings = self._settings[kind]
        label = f"{kind}-{self._name}-{group_id}" if self._name else f"{kind}-{group_id}"
        try:
            async with asyncio.TaskGroup() as tg:
                members = [
                    tg.create_task(
                        self._member(model, _attempt(task, label, group_id, index, settings.seed), settings),
                        name=f"episode {label}-{index}",
                    )
                    for index in range(settings.config.group_size)
                ]
        except BaseExceptionGroup as group:
            raise_first(group)
        finished = await self._group_scored([member.result() for member in members], label, settings)
        return TrajectoryGroup(group_id=group_id, task=task, episodes=tuple(one.record for one in finished))

    async def _member(self, model: ModelT, first: Attempt, settings: RolloutSettings) -> FinishedEpisode:
        async def play(number: int) -> FinishedEpisode:
            return (await self._play(model, replace(first, number=number), settings)).with_retries(number)

        return await _retried(play, f"episode {first.episode_id}", settings)

    async def _group_scored(
        self, finished: Sequence[FinishedEpisode], label: str, settings: RolloutSettings
    ) -> Sequence[FinishedEpisode]:
        """The episodes with the rewards of their group. Raises InfraError."""
        if not finished[0].scores_groups:
            return finished

        episodes, timeout_s = [one.episode for one in finished], settings.config.episode_timeout_s

        async def score(number: int) -> list[FinishedEpisode]:
            env = self._make_env()
            try:
                judged = await group_scored(env, episodes, timeout_s=timeout_s)
            finally:
                await close(env)
            return [
                one.with_group_rewards(episode).with_retries(number)
                for one, episode in zip(finished, judged, strict=True)
            ]

        return await _retried(score, f"the score of group {label}", settings)

    async def _play(self, model: ModelT, attempt: Attempt, settings: RolloutSettings) -> FinishedEpisode:
        env = self._make_env()
        if isinstance(env, AgentEnv):
            runner = self._runners.for_agent(env, attempt, model, settings)
        else:
            runner = self._runners.for_env(env, attempt, model, settings)
        return await play_episode(env, attempt, runner, settings.config)


def _attempt(task: Task, label: str, group_id: int, index: int, seed: int) -> Attempt:
    episode_seed = zlib.crc32(f"{seed}/{task.id}/{group_id}/{index}".encode())
    return Attempt(task=task, episode_id=f"{label}-{index}", seed=episode_seed)


async def _retried(attempt: Callable[[int], Coroutine[Any, Any, T]], what: str, settings: RolloutSettings) -> T:
    """`attempt` by its number, again up to `max_retries` times while a part fails. Raises the last InfraError."""
    max_retries = settings.config.max_retries
    for number in range(max_retries + 1):
        try:
            return await uninterrupted_close(attempt(number))
        except WeightSyncError:
            raise
        except InfraError as error:
            if number == max_retries:
                raise
            log.warning("%s failed, retry %d: %s", what, number + 1, error)
            await asyncio.sleep(backoff_s(number, base_s=settings.backoff_s))
    raise AssertionError("unreachable")
