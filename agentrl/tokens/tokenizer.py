"""Messages -> token ids, appended and never re-rendered. Knows no engine and no environment.

A TurnTokenizer is a vocabulary (codec), a way to write turns (strategy), and a way to write tool calls (format).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from agentrl.errors import ConfigError
from agentrl.tokens import renderers_strategy as library_turns
from agentrl.tokens.codec import Codec
from agentrl.tokens.strategies import RawStrategy, Strategy, Template, TemplateStrategy
from agentrl.tokens.strategy_checks import contents_stay_contents, self_test
from agentrl.tokens.tool_calls import THINK_OPEN, ParsedText
from agentrl.tokens.tool_formats import ToolFormat, make_format
from agentrl.types import Message, Role

log = logging.getLogger(__name__)

_Tools = Sequence[dict[str, Any]]


class TurnTokenizer:
    """Turns of one model as token ids. `load` refuses a tokenizer for which no strategy passes the self-test."""

    def __init__(
        self, codec: Codec, strategy: Strategy, *, eos_token_id: int | None, name: str, tool_format: str = "auto"
    ) -> None:
        self.name = name
        self.strategy = strategy
        self.close_id = strategy.close_id
        self.added_ids = codec.added_ids
        self.stop_token_ids = tuple(dict.fromkeys(i for i in (self.close_id, eos_token_id) if i is not None))
        self.opens_thought = codec.decode(strategy.following([_USER], spoken=())).rstrip().endswith(THINK_OPEN)
        self.format: ToolFormat = make_format(tool_format, codec, strategy, thinking=self.opens_thought)
        self._codec = codec
        self._eos_token_id = eos_token_id
        self._speaking: dict[str, TurnTokenizer] = {tool_format: self}

    @classmethod
    def load(cls, path: str, *, renderer: str = "auto", template_args: Mapping[str, Any] | None = None) -> Self:
        """From a Hugging Face folder or hub name.

        `PreTrainedTokenizerFast` and not `AutoTokenizer`: the latter imports torch wherever torch is installed.

        Args:
            renderer: `template`, `raw`, the renderers package's name for a family, or `auto`: the package where it
                knows the model, else the chat template, else (only without one) raw text.
            template_args: variables for the chat template, such as enable_thinking.

        Raises ConfigError when it cannot be loaded, or naming for every strategy tried what failed.
        """
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"no tokenizer could be loaded from {path}: {str(error).splitlines()[0]}") from error
        codec = Codec(tokenizer.backend_tokenizer)
        strategy = _choose(codec, tokenizer, renderer, dict(template_args or {}), path)
        log.info("turns are written by the %s", strategy.name)
        return cls(codec, strategy, eos_token_id=tokenizer.eos_token_id, name=path)

    def with_tool_format(self, tool_format: str) -> TurnTokenizer:
        """The same with another format of tool calls (`rollout.tool_format`). Raises ConfigError for an unknown one."""
        if tool_format not in self._speaking:
            other = TurnTokenizer(
                self._codec, self.strategy, eos_token_id=self._eos_token_id, name=self.name, tool_format=tool_format
            )
            other._speaking = self._speaking
            self._speaking[tool_format] = other
        return self._speaking[tool_format]

    def first_prompt(self, messages: Sequence[Message], tools: _Tools = ()) -> list[int]:
        """Ids of the whole opening, generation prompt included. Raises ConfigError if the template drops something."""
        return self.strategy.opening(*self.format.opening(messages, tools))

    def observation(self, messages: Sequence[Message], *, previous: Sequence[int]) -> list[int]:
        """The new ids only: what stands between the model's last token and its next turn.

        `previous` are the ids of the completion before. Where it was cut before its close token, that token is
        inserted. Everything returned was written by us: action mask 0.
        """
        is_open = bool(previous) and previous[-1] not in self.stop_token_ids
        raw = self.format.continuation(messages) if is_open else None
        if raw is not None:
            return self._codec.encode(raw)
        return self.strategy.following(self.format.shown(messages), spoken=previous)

    def can_append(self, roles: Sequence[Role]) -> bool:
        """Whether messages of `roles` are written alike whatever went before."""
        return self.strategy.can_append(roles)

    def parse(self, token_ids: Sequence[int], *, tools: _Tools, id_prefix: str = "call") -> ParsedText:
        """A completion taken apart by its ids: text, calls, and what did not parse."""
        return self.format.parse(self._spoken(token_ids), tools=tools, id_prefix=id_prefix)

    def demonstration(self, messages: Sequence[Message], tools: _Tools = ()) -> tuple[list[int], list[int]]:
        """(token_ids [T], action_mask [T]) of a whole scripted episode, by the very code path of a rollout.

        Assistant turns and their close token have mask 1, all else 0. Messages after the last assistant turn are not
        rendered: no rollout would show them to the model. Raises ValueError without an assistant message.
        """
        turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
        if not turns:
            raise ValueError("a demonstration needs at least one assistant message")
        token_ids = self.first_prompt(messages[: turns[0]], tools)
        mask = [0] * len(token_ids)
        spoken: list[int] = []
        for n, index in enumerate(turns):
            if n:
                seen = self.observation(messages[turns[n - 1] + 1 : index], previous=spoken)
                token_ids += seen
                mask += [0] * len(seen)
            spoken = self.turn(messages[index])
            token_ids += spoken
            mask += [1] * len(spoken)
        return token_ids, mask

    def turn(self, message: Message) -> list[int]:
        """A whole assistant turn as the model should write it, with the token that ends it where one does."""
        text = self.format.write(message)
        ids = self.encode_assistant(text)
        return ids if any(stop in text for stop in self.format.stop) else [*ids, self.close_id]

    def encode_assistant(self, text: str) -> list[int]:
        """Text as the model writes it: a marker such as `<tool_call>` is one token where the vocabulary has it."""
        return self._codec.encode_parts(self._codec.spoken(text))

    def assistant_text(self, token_ids: Sequence[int]) -> str:
        """What the model said, without the stop token it ended with."""
        return self.decode(self._spoken(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens spelled out."""
        return self._codec.decode(token_ids)

    def count(self, text: str) -> int:
        """Tokens of `text` as content."""
        return self._codec.count(text)

    def truncate(self, text: str, max_tokens: int, *, keep: str = "both") -> str:
        """At most `max_tokens` tokens of `text`: `both` ends, its `head` or its `tail`, and a note for what was cut."""
        return self._codec.truncate(text, max_tokens, keep=keep)

    def _spoken(self, token_ids: Sequence[int]) -> Sequence[int]:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return token_ids[:-1] if ended else token_ids


_USER = Message(role="user", content="x")


def _choose(codec: Codec, tokenizer: Any, renderer: str, template_args: dict[str, Any], path: str) -> Strategy:
    """The first strategy that passes. Raises ConfigError with what failed of each."""
    if reason := contents_stay_contents(codec):
        raise ConfigError(f"the tokenizer of {path} cannot be trained with: {reason}")
    family = library_turns.family_of(path) if renderer == "auto" else renderer
    ways = [family] if family else []
    if renderer == "auto":
        ways.append("template" if tokenizer.chat_template else "raw")
    reasons = []
    for way in ways:
        try:
            return _made(way, codec, tokenizer, template_args, path)
        except ConfigError as error:
            reasons.append(str(error))
            log.warning("%s", error)
    raise ConfigError(
        "; ".join(reasons) + ". With model.renderer: raw the model is trained without its chat template, on plain text"
    )


def _made(way: str, codec: Codec, tokenizer: Any, template_args: dict[str, Any], path: str) -> Strategy:
    """A strategy that has passed the self-test. Raises ConfigError."""
    eos_id: int | None = tokenizer.eos_token_id
    if way == "raw":
        strategy: Strategy = RawStrategy(codec, bos_id=tokenizer.bos_token_id, eos_id=eos_id, name=path)
        self_test(codec, strategy, whole=None)
        return strategy
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {path} has no chat template; add chat_template.jinja to the folder")
    template = _template(tokenizer, template_args)
    if way == "template":
        strategy = TemplateStrategy(codec, template, name=path)
    else:
        strategy = library_turns.load_strategy(codec, way, eos_id=eos_id, template_args=template_args)
    self_test(
        codec, strategy, whole=lambda m: template([{"role": x.role, "content": x.content} for x in m], None, True)
    )
    return strategy


def _template(tokenizer: Any, template_args: dict[str, Any]) -> Template:
    def render(messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **template_args
        )
        return text

    return render
