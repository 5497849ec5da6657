"""Fakes for tests of environments, rewards and algorithms: an engine that follows a script, and made-up records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.errors import EngineError
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import (
    Completion,
    EpisodeRecord,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    TransferInit,
    Turn,
    VersionSpan,
    WeightsRef,
)

Script = Sequence[str | Message] | Callable[[str], str | Message]


def call(name: str, **arguments: object) -> Message:
    """An assistant message with one tool call.

    >>> call("python", code="print(1)").tool_calls[0].arguments
    {'code': 'print(1)'}
    """
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))


def completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    version: int = 0,
    *,
    finish_reason: FinishReason = FinishReason.STOP,
) -> Completion:
    """A made-up generation under one version. `token_ids`, `logprobs`: [T], natural log.

    >>> completion((5, 7), (-0.1, -0.2)).version_spans
    (VersionSpan(version=0, start=0, end=2),)
    """
    spans = (VersionSpan(version=version, start=0, end=len(token_ids)),) if token_ids else ()
    return Completion(
        token_ids=tuple(token_ids),
        behavior_logprobs=tuple(logprobs),
        version_spans=spans,
        finish_reason=finish_reason,
    )


def trajectory(name: str, turns: Sequence[Turn], *, reward: float, task_id: str = "t") -> Trajectory:
    """A made-up trajectory with these turns and this reward; everything else is a default."""
    return Trajectory(
        id=name,
        task_id=task_id,
        turns=tuple(turns),
        messages=(),
        reward=reward,
        rewards={"correct": reward},
        stop_reason=StopReason.COMPLETED,
    )


def episode_of(*segments: Trajectory) -> EpisodeRecord:
    """An episode of these segments; its id is the first segment's."""
    return EpisodeRecord(id=segments[0].id, segments=segments)


def group(group_id: int, members: Sequence[Trajectory | EpisodeRecord], *, task: Task | None = None) -> TrajectoryGroup:
    """A group of one task; a trajectory among `members` is an episode of its own.

    group(0, [trajectory("0-0", turns, reward=1.0), trajectory("0-1", turns, reward=0.0)])
    """
    return with_members(TrajectoryGroup(group_id=group_id, task=task or Task(id="t", prompt="?"), episodes=()), members)


def with_members(group: TrajectoryGroup, members: Iterable[Trajectory | EpisodeRecord]) -> TrajectoryGroup:
    """`group` with other members."""
    episodes = (member if isinstance(member, EpisodeRecord) else episode_of(member) for member in members)
    return replace(group, episodes=tuple(episodes))


def one_token_group(
    group_id: int, *, versions: Sequence[int], rewards: Sequence[float] = (0.0, 1.0), task: Task | None = None
) -> TrajectoryGroup:
    """The smallest group: each member has one action token. `versions`, `rewards`: one per member, [G]."""
    task = task or Task(id="t", prompt="?")
    members = []
    for index, (version, reward) in enumerate(zip(versions, rewards, strict=True)):
        turn = Turn(observation_ids=(1,), completion=completion((3,), (-0.5,), version))
        members.append(trajectory(f"{group_id}-{index}", [turn], reward=reward, task_id=task.id))
    return group(group_id, members, task=task)


@dataclass(kw_only=True)
class ScriptedEngine:
    """An Engine that needs no model: turn n of every episode is `script[n]`, or `script(prompt_text)`.

    Answers follow the sampling: cut at `max_tokens`, ended by a stop string or else by the close token. Behaviour
    logprobs are `logprob`; versions are those of `update_weights`. A script that runs out raises EngineError; turns are
    counted by `session_id`. `prompts` keeps the ids of every request for assertions.

        engine = ScriptedEngine(tokenizer=tokenizer, script=[call("python", code="print(6*7)"), "42"])
    """

    tokenizer: TurnTokenizer
    script: Script
    logprob: float = -0.5
    latency_s: float = 0.0
    policy_version: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    _turns: dict[str | None, dict[str, int]] = field(default_factory=dict)  # by session and request

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """The next scripted turn."""
        self.prompts[request_id] = list(token_ids)
        session = self._turns.setdefault(session_id, {})
        turn = session.setdefault(request_id, len(session))  # a request that is sent again gets the same answer
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return self.completion(self._say(token_ids, turn), max_tokens=sampling.max_tokens, stop=sampling.stop)

    def completion(self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        """`text` as a generation of the current version."""
        ids = self._turn(text, stop)
        is_cut = max_tokens is not None and len(ids) > max_tokens
        ids = ids[:max_tokens]
        finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return completion(ids, (self.logprob,) * len(ids), self.policy_version, finish_reason=finish_reason)

    @property
    def wants_weights(self) -> bool:
        """Never."""
        return False

    async def receivers(self, policy_version: int) -> Receivers:
        """Itself."""
        return Receivers(engines=("scripted",))

    async def init_transfer(self, init: TransferInit) -> None:
        """No-op: there is no group to join."""

    async def pause(self) -> None:
        """No-op: its answers take no time that a pause could interrupt."""

    async def sleep(self) -> None:
        """No-op: it holds no memory of a GPU."""

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """Set the version of later tokens."""
        self.policy_version = ref.policy_version
        return WeightUpdate(gap_s=1e-9, num_bytes=ref.num_bytes, parity=None)

    def metrics(self) -> dict[str, float]:
        """No metrics."""
        return {}

    def _turn(self, text: str, stop: Sequence[str]) -> list[int]:
        """Ids of a turn, up to and with the token that completes a stop string."""
        ids = self.tokenizer.encode_assistant(text)
        if any(string in text for string in stop):
            for end in range(1, len(ids) + 1):
                if any(string in self.tokenizer.decode(ids[:end]) for string in stop):
                    return ids[:end]
        return [*ids, self.tokenizer.close_id]

    def _say(self, token_ids: Sequence[int], turn: int) -> str:
        if callable(self.script):
            said = self.script(self.tokenizer.decode(token_ids))
        else:
            if turn >= len(self.script):
                raise EngineError(f"the script has {len(self.script)} turns, turn {turn + 1} was asked for")
            said = self.script[turn]
        return said if isinstance(said, str) else self.tokenizer.format.write(said)
