"""An environment's episode: its loop of turns, with a model as the speaker.

Independent of tokens and engines: a ModelSpeaker has the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.env import Dialogue, Env, Speaker
from agentrl.errors import EnvError
from agentrl.rollouts.episode import PlayedEpisode, SegmentRecord
from agentrl.types import Message, StopReason, Task


class ModelSpeaker(Speaker, Protocol):
    """A model that says the turns of one episode and records them.

    Example: `EnvRunner(env, task, speaker, max_turns=8, reset_timeout_s=600)` asks it for each turn.
    """

    @property
    def segments(self) -> Sequence[SegmentRecord]:
        """The token record, oldest segment first; empty where the model returns no tokens."""
        ...

    @property
    def counts(self) -> Mapping[str, float]:
        """Numbers for the episode's info."""
        ...

    def open(self, task: Task, messages: Sequence[Message]) -> None:
        """Receive the first messages. Raises ConfigError when they do not fit."""
        ...


class EnvRunner:
    """An EpisodeRunner for an Env.

    runner = EnvRunner(env, task, speaker, max_turns=8, reset_timeout_s=600)
    """

    is_generating = True
    """The environment has deadlines of its own. An episode without a turn has no answer of the model."""

    def __init__(self, env: Env, task: Task, speaker: ModelSpeaker, *, max_turns: int, reset_timeout_s: float) -> None:
        self._dialogue = Dialogue(env=env, task=task, counts={"tool_calls": 0.0, "tool_errors": 0.0, "tool_s": 0.0})
        self._speaker = speaker
        self._max_turns = max_turns
        self._reset_timeout_s = reset_timeout_s

    @property
    def has_turns(self) -> bool:
        """See EpisodeRunner."""
        return self._dialogue.num_turns > 0

    async def begin(self, seed: int) -> None:
        """See EpisodeRunner."""
        task = self._dialogue.task
        try:
            async with asyncio.timeout(self._reset_timeout_s):
                await self._dialogue.begin(seed)
        except TimeoutError as error:
            raise EnvError(f"reset of task {task.id} took more than {self._reset_timeout_s:g} s") from error
        self._speaker.open(task, self._dialogue.messages)

    async def play(self) -> StopReason:
        """See EpisodeRunner."""
        return await self._dialogue.play(self._speaker, max_turns=self._max_turns)

    def record(self) -> PlayedEpisode:
        """See EpisodeRunner."""
        dialogue, segments = self._dialogue, tuple(self._speaker.segments)
        messages = tuple(dialogue.messages)
        if len(segments) <= 1:  # it holds all that was said, the environment's last words included
            turns = segments[0].turns if segments else ()
            segments = (SegmentRecord(turns=turns, messages=messages),)
        num_turns = sum(len(segment.turns) for segment in segments) or dialogue.num_turns
        return PlayedEpisode(
            messages=messages,
            segments=segments,
            counts={**dialogue.counts, **self._speaker.counts, "turns": num_turns},
            step_rewards=tuple(dialogue.step_rewards),
        )
