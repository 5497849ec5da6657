"""The record of one agent's calls as segments: token sequences that only grow.

A call continues an earlier one if its messages are those of the earlier call, its answer, and new messages without an
assistant's. Then only the new messages are encoded, and the answer stays as it was sampled. Any other call opens a new
segment. Its prompt is rendered in full, or copied up to the answer where it branches off. The prompt contains no action
of the new segment, so every sampled token is an action exactly once over all segments. Independent of engines and HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Message, Turn

_Tools = Sequence[dict[str, Any]]


@dataclass(kw_only=True, eq=False)
class BranchSegment:
    """A conversation that grew without a break, as an agent's calls produced it.

    Example: `segment.token_ids[-1]` is the last token of the last answer or observation.
    """

    token_ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """As generated; the agent may have received less (no thoughts) and may send back less."""
    turns: list[Turn] = field(default_factory=list)
    is_busy: bool = False
    """A call that continues it is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """Where the answer to a call will be recorded.

    point = store.branch_point(messages, tools)
    completion = await generate(point.prompt_ids)
    """

    segment: BranchSegment
    num_tokens: int  # of the segment, up to the call
    observation_ids: tuple[int, ...]  # tokens of the prompt that the segment does not hold yet
    messages: tuple[Message, ...]  # as generated, up to the call
    history: tuple[Message, ...]  # the same messages as the agent sent them
    tools: tuple[dict[str, Any], ...]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens to continue. [T]"""
        return [*self.segment.token_ids[: self.num_tokens], *self.observation_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A recorded answer that later calls may continue."""

    segment: BranchSegment
    num_turns: int  # of the segment, up to and with this answer
    num_tokens: int
    num_messages: int
    shown: Message
    completion: Completion

    @property
    def is_open(self) -> bool:
        """Whether its segment ends with it, and no call that continues it is under way."""
        return self.num_turns == len(self.segment.turns) and not self.segment.is_busy


class SegmentStore:
    """All segments of one episode. Calls may overlap: take a `branch_point` for each, then `commit` or `release` it.

    point = store.branch_point(messages, tools)
    completion = await generate(point.prompt_ids)
    store.commit(point, completion, said=said, shown=shown)
    """

    def __init__(self, tokenizer: TurnTokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[bytes, list[_Answer]] = {}
        self._appendable: dict[tuple[str, ...], bool] = {}
        self.segments: list[BranchSegment] = []
        """Segments with at least one answer, oldest first."""
        self.latest: BranchSegment | None = None
        """The segment with the last answer."""

    def branch_point(self, messages: Sequence[Message], tools: _Tools) -> BranchPoint:
        """Find what the call continues. Raises ConfigError when the chat template refuses the messages."""
        num_known = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
        known, new = messages[:num_known], messages[num_known:]
        answer = self._find(known, tools) if num_known and self._can_append(new) else None
        if answer is None:
            segment, said = BranchSegment(), list(messages)
            ids = self._tokenizer.first_prompt(messages, tools)
        else:
            segment, said = answer.segment, [*answer.segment.messages[: answer.num_messages], *new]
            ids = self._tokenizer.observation(new, previous=answer.completion.token_ids)
            if not answer.is_open:
                ids = [*segment.token_ids[: answer.num_tokens], *ids]
                segment = BranchSegment()
        segment.is_busy = True
        return BranchPoint(
            segment=segment,
            num_tokens=len(segment.token_ids),
            observation_ids=tuple(ids),
            messages=tuple(said),
            history=tuple(messages),
            tools=tuple(tools),
        )

    def commit(self, point: BranchPoint, completion: Completion, *, said: Message, shown: Message) -> None:
        """Record a completion. `said`: the message it contains; `shown`: what the agent received and will send back."""
        segment = point.segment
        if len(segment.token_ids) != point.num_tokens:
            raise AssertionError("a segment grew while a call that continues it was under way")
        if not segment.turns:
            self.segments.append(segment)
        segment.turns.append(Turn(observation_ids=point.observation_ids, completion=completion))
        segment.token_ids += [*point.observation_ids, *completion.token_ids]
        segment.messages = [*point.messages, said]
        segment.is_busy = False
        self.latest = segment
        answer = _Answer(
            segment=segment,
            num_turns=len(segment.turns),
            num_tokens=len(segment.token_ids),
            num_messages=len(segment.messages),
            shown=shown,
            completion=completion,
        )
        self._answers.setdefault(_key([*point.history, shown], point.tools), []).append(answer)

    def release(self, point: BranchPoint) -> None:
        """Give up a branch point whose call was not answered."""
        point.segment.is_busy = False

    def _find(self, known: Sequence[Message], tools: _Tools) -> _Answer | None:
        """The answer that ends `known`. If the model gave it twice, the calls' ids decide, then which one is open."""
        answers = self._answers.get(_key(known, tools), ())
        ids = [call.id for call in known[-1].tool_calls]
        return max(
            answers,
            key=lambda a: ([call.id for call in a.shown.tool_calls] == ids, a.is_open),
            default=None,
        )

    def _can_append(self, new: Sequence[Message]) -> bool:
        """Whether messages of these roles are written the same way after every dialogue."""
        roles = tuple(message.role for message in new)
        if roles not in self._appendable:
            self._appendable[roles] = self._tokenizer.can_append(roles)
        return self._appendable[roles]


def _key(messages: Sequence[Message], tools: _Tools) -> bytes:
    """A digest of a history. It ignores call ids, which produce no token, and space around an answer."""
    parts = [
        (
            message.role,
            message.content.strip() if message.role == "assistant" else message.content,
            [(call.name, call.arguments) for call in message.tool_calls],
        )
        for message in messages
    ]
    return hashlib.sha256(msgspec.json.encode((parts, tools), order="sorted")).digest()
