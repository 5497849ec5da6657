"""One episode's token record under a context limit: it only grows, or it forks.

A fork begins a new segment with a shorter prompt: old observations are left out, or a summary replaces the dialogue.
Earlier turns of the model stay as they were sampled and are context there, not actions. So over all segments every
sampled token is an action exactly once, after exactly the tokens that the engine received. Independent of engines and
environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.tokens.codec import cut_chars
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tokens.tool_calls import THINK_CLOSE
from agentrl.types import Completion, Message, Turn

MIN_DROPPED_SHARE = 0.25
"""While there is room for a turn, old output is dropped only if it is this share of the prompt."""
DROPPED = "[earlier output left out]"
SUMMARY_REQUEST = (
    "\n\n[The context is nearly full. Write down now all that you need to go on: what was asked, what you tried, what "
    "you found. Nothing else will be kept. Call no tool.]"
)
SUMMARY_HEADER = "\n\nYou have worked on this before. Your notes:\n"


@dataclass(kw_only=True)
class ContextSegment:
    """A part of an episode whose tokens grew without a break.

    Example: `ContextSegment(token_ids=[5, 7], messages=[user("hi")])`.
    """

    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """As the prompt of this segment shows them."""


@dataclass(kw_only=True)
class _Round:
    """A turn of the model and the environment's answer."""

    said: Message
    completion: Completion
    answer: list[Message]
    num_answer_tokens: int = 0


class ContextWindow:
    """The prompt of one episode's next turn, and the segments recorded so far.

    window.open([user("What is 2 + 2?")])
    completion = await generate(window.prompt())
    window.record(completion, said)
    window.observe(result.observation)
    """

    def __init__(self, tokenizer: TurnTokenizer, config: RolloutConfig, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._tools = tools
        self._opening: list[Message] = []
        self._rounds: list[_Round] = []
        self._pending: list[int] = []
        self._num_checked = 0
        self.segments: list[ContextSegment] = []

    @property
    def segment(self) -> ContextSegment:
        """The segment that is growing now."""
        return self.segments[-1]

    @property
    def num_tokens(self) -> int:
        """Length of the prompt that the model would get now."""
        return len(self.segment.token_ids) + len(self._pending)

    def open(self, messages: Sequence[Message]) -> None:
        """Begin an episode. Raises ConfigError when the chat template refuses the messages."""
        self._opening = list(messages)
        self._begin(messages, self._tokenizer.first_prompt(messages, self._tools))

    def prompt(self) -> list[int]:
        """All tokens to continue [T]. Raises AssertionError unless they extend the recorded turns."""
        segment = self.segment
        if segment.turns:
            last = segment.turns[-1].completion.token_ids
            if len(segment.token_ids) != self._num_checked or tuple(segment.token_ids[-len(last) :]) != last:
                raise AssertionError("the prompt does not extend the recorded turns")
        return segment.token_ids + self._pending

    def record(self, completion: Completion, said: Message) -> None:
        """Append the pending prompt tokens and the completion, whose message is `said`."""
        segment = self.segment
        segment.turns.append(Turn(observation_ids=tuple(self._pending), completion=completion))
        segment.token_ids += self._pending
        segment.token_ids += completion.token_ids
        segment.messages.append(said)
        self._num_checked += len(self._pending) + len(completion.token_ids)
        self._pending = []
        self._rounds.append(_Round(said=said, completion=completion, answer=[]))

    def observe(self, messages: Sequence[Message]) -> list[Message]:
        """Append the answer to the last turn, cut to its limits, and return it as appended.

        It is encoded before it is cut: usually it fits, and is then encoded only once.
        """
        last = self._rounds[-1]
        config, completion_ids = self._config, last.completion.token_ids
        shown = [self._cut_chars(message) for message in messages]
        self._pending = self._tokenizer.observation(shown, previous=completion_ids)
        if len(self._pending) > config.tool_output_tokens // max(_num_answers(shown), 1):
            shown = self.cut(shown)
            self._pending = self._tokenizer.observation(shown, previous=completion_ids)
        last.answer, last.num_answer_tokens = shown, len(self._pending)
        self.segment.messages.extend(shown)
        return shown

    def cut(self, observation: Sequence[Message]) -> list[Message]:
        """Tool output within `tool_output_chars` and `tool_output_tokens`; answers of one turn share the tokens."""
        share = self._config.tool_output_tokens // max(_num_answers(observation), 1)
        return [self._cut_tokens(self._cut_chars(message), share) for message in observation]

    def _cut_chars(self, message: Message) -> Message:
        config = self._config
        if message.role != "tool" or config.tool_output_chars is None:
            return message
        text = cut_chars(message.content, config.tool_output_chars, keep=config.tool_output_keep)
        return message if text == message.content else replace(message, content=text)

    def _cut_tokens(self, message: Message, max_tokens: int) -> Message:
        if message.role != "tool":
            return message
        text = self._tokenizer.truncate(message.content, max_tokens, keep=self._config.tool_output_keep)
        return message if text == message.content else replace(message, content=text)

    @property
    def is_nearly_full(self) -> bool:
        """Whether the prompt is longer than `compact_at_tokens` and a fork would free enough."""
        config = self._config
        if config.compaction == "none" or self.num_tokens <= config.compaction_tokens:
            return False
        if config.compaction == "summarize":
            return bool(self._rounds)
        num_old = sum(round_.num_answer_tokens for round_ in self._rounds[:-1] if _droppable(round_.answer))
        has_room = self.num_tokens + config.max_turn_tokens + config.tool_output_tokens <= config.max_context
        return num_old >= MIN_DROPPED_SHARE * self.num_tokens or (num_old > 0 and not has_room)

    def drop_old(self) -> None:
        """Fork: replace all observations except the last by a short note. The model's turns stay as they are."""
        for round_ in self._rounds[:-1]:
            round_.answer = [replace(m, content=DROPPED) if m.role == "tool" else m for m in round_.answer]
        ids = self._tokenizer.first_prompt(self._opening, self._tools)
        messages = list(self._opening)
        for round_ in self._rounds:
            said = round_.completion.token_ids
            ids += [*said, *self._tokenizer.observation(round_.answer, previous=said)]
            messages += [round_.said, *round_.answer]
        rounds = self._rounds
        self._begin(messages, ids)
        self._rounds = rounds

    def ask_for_summary(self) -> None:
        """Append the request for notes to the pending observation."""
        *others, last = self._rounds[-1].answer
        messages = [*others, replace(last, content=last.content + SUMMARY_REQUEST)]
        self.segment.messages[-1] = messages[-1]
        self._pending = self._tokenizer.observation(messages, previous=self._rounds[-1].completion.token_ids)

    def take_summary(self) -> None:
        """Fork: keep the opening, with the last turn as the model's notes."""
        text = self._rounds[-1].said.content
        notes = text.rpartition(THINK_CLOSE)[2].strip()
        *before, last = self._opening
        opening = [*before, replace(last, content=last.content + SUMMARY_HEADER + notes)]
        self._begin(opening, self._tokenizer.first_prompt(opening, self._tools))

    def _begin(self, messages: Sequence[Message], ids: list[int]) -> None:
        self.segments.append(ContextSegment(messages=list(messages)))
        self._rounds = []
        self._pending = ids
        self._num_checked = 0


def _num_answers(messages: Sequence[Message]) -> int:
    return sum(message.role == "tool" for message in messages)


def _droppable(answer: Sequence[Message]) -> bool:
    return any(message.role == "tool" and len(message.content) > len(DROPPED) for message in answer)
