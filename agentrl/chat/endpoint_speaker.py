"""A model behind a chat endpoint as the speaker of an environment's episode. For evaluation only.

Independent of tokenizers: such a model does not return the tokens that it sampled, so no turn is recorded and nothing
can be trained on it. Counts of tokens are the endpoint's; tool output is cut by characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.chat_model import ChatModel, PromptTooLong
from agentrl.config import RolloutConfig
from agentrl.env import Action, StepResult
from agentrl.errors import ConfigError
from agentrl.rollouts.episode import SegmentRecord
from agentrl.tokens.codec import cut_chars
from agentrl.types import Message, Task

CHARACTERS_PER_TOKEN = 4
"""Characters that a token of rollout.tool_output_tokens stands for where tokens cannot be counted."""


class EndpointSpeaker:
    """A ModelSpeaker over a ChatModel.

    speaker = EndpointSpeaker(model, tools=env.tool_schemas(), config=config)
    """

    segments: Sequence[SegmentRecord] = ()
    """See ModelSpeaker: there is no token record."""

    def __init__(self, model: ChatModel, *, tools: Sequence[dict[str, Any]], config: RolloutConfig) -> None:
        self._model = model
        self._tools = tools
        self._config = config
        self._task_id = ""
        self._messages: list[Message] = []
        self._num_tokens = 0  # of the whole conversation, by the endpoint's last count
        self._num_completion_tokens = 0
        self._generate_s = 0.0

    @property
    def counts(self) -> Mapping[str, float]:
        """See ModelSpeaker."""
        return {"completion_tokens": self._num_completion_tokens, "generate_s": self._generate_s}

    def open(self, task: Task, messages: Sequence[Message]) -> None:
        """See ModelSpeaker. Whether the messages fit shows when the endpoint is asked."""
        self._task_id = task.id
        self._messages = list(messages)

    async def speak(self, turn: int, *, is_last: bool) -> Action | None:
        """See Speaker. Raises ConfigError when the endpoint refuses the first prompt as too long."""
        config = self._config
        max_tokens = min(config.max_turn_tokens, config.max_context - self._num_tokens)
        if max_tokens < config.min_turn_tokens:
            return None
        try:
            reply = await self._model.say(
                self._messages,
                self._tools,
                max_tokens=max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
            )
        except PromptTooLong as error:
            if turn == 0:
                raise ConfigError(f"task {self._task_id}: its prompt does not fit the model: {error}") from error
            return None
        self._num_tokens = reply.num_prompt_tokens + reply.num_completion_tokens
        self._num_completion_tokens += reply.num_completion_tokens
        self._generate_s += reply.generate_s
        self._messages.append(reply.message)
        return Action(
            message=reply.message,
            parse_errors=reply.parse_errors,
            finish_reason=reply.finish_reason,
            cut_by=config.limit_of(reply.num_completion_tokens),
        )

    def observe(self, result: StepResult) -> Sequence[Message]:
        """See Speaker. Tool output is cut; several answers of one turn share the allowance."""
        shown = shortened(result.observation, self._config)
        self._messages.extend(shown)
        return shown


def shortened(observation: Sequence[Message], config: RolloutConfig) -> list[Message]:
    """The messages, with tool output within `tool_output_tokens` (by characters) and `tool_output_chars`."""
    num_answers = sum(message.role == "tool" for message in observation)
    share = CHARACTERS_PER_TOKEN * config.tool_output_tokens // max(num_answers, 1)
    share = min(share, config.tool_output_chars or share)
    return [
        replace(message, content=_cut(message.content, share, config.tool_output_keep))
        if message.role == "tool"
        else message
        for message in observation
    ]


def _cut(text: str, max_characters: int, keep: str) -> str:
    """At most that many characters, including the note that replaces what was cut."""
    if len(text) <= max_characters:
        return text
    note = f"\n[... {len(text) - max_characters}+ characters cut ...]\n"
    return cut_chars(text, max(max_characters - len(note), 2), keep=keep, note=note)
