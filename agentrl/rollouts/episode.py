"""The life of one episode: begun, played up to a deadline, scored, closed whatever happens, recorded.

An EpisodeRunner leads the conversation and has the model. A record exists only for an episode in which every part
worked: infrastructure failures raise. Independent of tokens, engines and HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.config import RolloutConfig
from agentrl.env import STEP_REWARD, Env, Episode, close, scored
from agentrl.errors import EngineError, EnvError
from agentrl.rollouts.outcome import judged
from agentrl.rollouts.settings import Attempt
from agentrl.types import EpisodeRecord, Message, StopReason, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """One conversation that grew without a break: its tokens, where they are known, and its messages.

    SegmentRecord(turns=(), messages=(user("hi"), answer))  # of an endpoint that returns no tokens
    """

    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    counts: Mapping[str, float] = field(default_factory=dict)  # of this segment alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """What an EpisodeRunner recorded, not yet scored.

    PlayedEpisode(messages=segment.messages, segments=(segment,), counts={"turns": 2})
    """

    messages: tuple[Message, ...]  # of the whole episode
    segments: tuple[SegmentRecord, ...]  # oldest first
    counts: Mapping[str, float]
    step_rewards: tuple[float, ...] = ()  # what `step` returned for each turn of the dialogue; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """A scored episode, and its record: what `score_group` sees, and what is trained on.

    finished = await play_episode(env, attempt, runner, config)
    finished.record.segments
    """

    episode: Episode
    record: EpisodeRecord
    scores_groups: bool = False  # its environment's rewards are not complete without those of its group

    def with_group_rewards(self, episode: Episode) -> FinishedEpisode:
        """With the rewards that the group added, in each segment; what is punished there stays punished."""
        old = self.episode.reward
        segments = tuple(
            replace(one, reward=episode.reward + (one.reward - old), rewards={**one.rewards, **episode.rewards})
            for one in self.record.segments
        )
        return replace(self, episode=episode, record=replace(self.record, segments=segments))

    def with_retries(self, number: int) -> FinishedEpisode:
        """With so many more failed attempts."""
        if number == 0:
            return self
        segments = (
            replace(one, info={**one.info, "retries": one.info.get("retries", 0.0) + number})
            for one in self.record.segments
        )
        return replace(self, record=replace(self.record, segments=tuple(segments)))


class EpisodeRunner(Protocol):
    """Plays one episode to its end and records it; does not score it.

    await runner.begin(seed)
    stop_reason = await runner.play()
    played = runner.record()
    """

    @property
    def has_turns(self) -> bool:
        """Whether the model has said anything."""
        ...

    @property
    def is_generating(self) -> bool:
        """Once the deadline has cut off `play`: whether it was waiting for the model."""
        ...

    async def begin(self, seed: int) -> None:
        """Everything up to the model's first turn. Raises InfraError, ConfigError when the prompt does not fit."""
        ...

    async def play(self) -> StopReason:
        """Turns until something ends the episode. Raises InfraError when a part fails."""
        ...

    def record(self) -> PlayedEpisode:
        """The messages so far."""
        ...


async def play_episode(env: Env, attempt: Attempt, runner: EpisodeRunner, config: RolloutConfig) -> FinishedEpisode:
    """Play one episode and score it; `env` is closed whatever happens.

    Each segment has the reward of the whole and its share in the gradient. Raises EnvError, SandboxError, EngineError
    when a part failed; ConfigError when the prompt does not fit.
    """
    started, started_at = time.monotonic(), round(time.time(), 3)
    try:
        await runner.begin(attempt.seed)
        stop_reason = await _play(runner, attempt.task, config.episode_timeout_s)
        played = runner.record()
        wall_s = time.monotonic() - started
        times = {"wall_s": wall_s, "started_at": started_at, "ended_at": round(time.time(), 3)}
        counts = {"segments": len(played.segments), **times}
        episode = Episode(
            task=attempt.task,
            messages=played.messages,
            stop_reason=stop_reason,
            step_reward=sum(played.step_rewards),
            info={**played.counts, **counts},
        )
        episode = await scored(env, episode, timeout_s=config.episode_timeout_s)
        weight = env.reward_weights.get(STEP_REWARD, 1.0)
    finally:
        await close(env)
    played = with_turn_rewards(played, weight, has_notes=config.compaction == "summarize")
    segments = _trajectories(attempt.episode_id, played, episode, config)
    record = EpisodeRecord(id=attempt.episode_id, segments=segments)
    return FinishedEpisode(episode=episode, record=record, scores_groups=env.scores_groups)


async def _play(runner: EpisodeRunner, task: Task, timeout_s: float) -> StopReason:
    """Play until the deadline, which ends the episode with what was finished by then."""
    try:
        async with asyncio.timeout(timeout_s):
            return await runner.play()
    except TimeoutError:
        if runner.has_turns:
            return StopReason.TIMEOUT
    late = f"task {task.id}: no turn was generated within {timeout_s:g} s"
    raise EngineError(late) if runner.is_generating else EnvError(f"{late}: the agent asked for none")


def with_turn_rewards(played: PlayedEpisode, weight: float, *, has_notes: bool) -> PlayedEpisode:
    """The record with the rewards of `step`, times `weight`, in the turns that earned them.

    `has_notes`: each segment but the last ends with a turn that the environment never saw, the model's own summary. A
    turn that was recorded when the deadline passed has no reward.
    """
    if not any(played.step_rewards):
        return played
    left = iter(played.step_rewards)
    segments = []
    for segment in played.segments:
        num_seen = len(segment.turns) - (has_notes and segment is not played.segments[-1])
        seen = (replace(turn, reward=weight * next(left, 0.0)) for turn in segment.turns[:num_seen])
        segments.append(replace(segment, turns=(*seen, *segment.turns[num_seen:])))
    return replace(played, segments=tuple(segments))


def _trajectories(
    episode_id: str, played: PlayedEpisode, episode: Episode, config: RolloutConfig
) -> tuple[Trajectory, ...]:
    is_numbered = len(played.segments) > 1
    segments = [
        _trajectory(f"{episode_id}.{number}" if is_numbered else episode_id, segment, episode)
        for number, segment in enumerate(played.segments)
    ]
    has_tokens = any(segment.turns for segment in segments)
    return judged(segments, config) if has_tokens else tuple(segments)  # without tokens nothing is trained


def _trajectory(trajectory_id: str, segment: SegmentRecord, episode: Episode) -> Trajectory:
    return Trajectory(
        id=trajectory_id,
        task_id=episode.task.id,
        turns=segment.turns,
        messages=segment.messages,
        reward=episode.reward,
        rewards=dict(episode.rewards),
        stop_reason=episode.stop_reason,
        info={**episode.info, **segment.counts},
    )
