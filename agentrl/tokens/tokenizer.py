"""Messages -> token ids, appended and never rendered again. Independent of engines and environments.

A TurnTokenizer combines a vocabulary (Codec), a way to write turns (Strategy), and a way to write tool calls
(ToolFormat).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from agentrl.config import ModelConfig
from agentrl.errors import ConfigError
from agentrl.tokens import renderers_strategy as library_turns
from agentrl.tokens.codec import Codec
from agentrl.tokens.strategies import RawStrategy, Strategy, Template, TemplateStrategy
from agentrl.tokens.strategy_checks import check_strategy, contents_stay_contents
from agentrl.tokens.tool_calls import THINK_OPEN, ParsedText
from agentrl.tokens.tool_formats import ToolFormat, make_format
from agentrl.types import Message, Role

log = logging.getLogger(__name__)

_Tools = Sequence[dict[str, Any]]


class TurnTokenizer:
    """Turns of one model as token ids. `load` refuses a tokenizer for which no strategy passes its checks.

    tokenizer = TurnTokenizer.load("Qwen/Qwen2.5-0.5B-Instruct")
    prompt_ids = tokenizer.first_prompt([user("What is 2 + 2?")])
    parsed = tokenizer.parse(completion.token_ids, tools=())
    """

    def __init__(
        self, codec: Codec, strategy: Strategy, *, eos_token_id: int | None, name: str, tool_format: str = "auto"
    ) -> None:
        self.name = name
        self.strategy = strategy
        self.close_id = strategy.close_id
        self.added_ids = codec.added_ids
        self.stop_token_ids = tuple(dict.fromkeys(i for i in (self.close_id, eos_token_id) if i is not None))
        self.opens_thought = codec.decode(strategy.following([_USER], completion_ids=())).rstrip().endswith(THINK_OPEN)
        self.format: ToolFormat = make_format(tool_format, codec, strategy, thinking=self.opens_thought)
        self._codec = codec
        self._eos_token_id = eos_token_id
        self._by_format: dict[str, TurnTokenizer] = {tool_format: self}

    @classmethod
    def load(cls, path: str, *, renderer: str = "auto", template_args: Mapping[str, Any] | None = None) -> Self:
        """From a Hugging Face folder or hub name.

        `PreTrainedTokenizerFast` and not `AutoTokenizer`: the latter imports torch wherever torch is installed.

        Args:
            renderer: `template`, `raw`, the renderers package's name for a family, or `auto`: the package where it
                knows the model, else the chat template, else (only without one) raw text.
            template_args: variables for the chat template, such as enable_thinking.

        Raises ConfigError when it cannot be loaded, or with the failed check of every strategy that was tried.
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
        """This tokenizer with another tool-call format (`rollout.tool_format`). Raises ConfigError if unknown."""
        if tool_format not in self._by_format:
            other = TurnTokenizer(
                self._codec, self.strategy, eos_token_id=self._eos_token_id, name=self.name, tool_format=tool_format
            )
            other._by_format = self._by_format
            self._by_format[tool_format] = other
        return self._by_format[tool_format]

    def first_prompt(self, messages: Sequence[Message], tools: _Tools = ()) -> list[int]:
        """Ids of the whole opening with the generation prompt. Raises ConfigError if the template drops a content."""
        return self.strategy.opening(*self.format.opening(messages, tools))

    def observation(self, messages: Sequence[Message], *, previous: Sequence[int]) -> list[int]:
        """The new ids only: everything between the model's last token and its next turn.

        All returned ids have action mask 0.

        Args:
            previous: ids of the completion before. If it was cut before its close token, that token is inserted.
        """
        is_open = bool(previous) and previous[-1] not in self.stop_token_ids
        raw = self.format.continuation(messages) if is_open else None
        if raw is not None:
            return self._codec.encode(raw)
        return self.strategy.following(self.format.shown(messages), completion_ids=previous)

    def can_append(self, roles: Sequence[Role]) -> bool:
        """Whether messages of `roles` are written the same way after every dialogue."""
        return self.strategy.can_append(roles)

    def parse(self, token_ids: Sequence[int], *, tools: _Tools, id_prefix: str = "call") -> ParsedText:
        """Parse a completion by its ids into text, calls, and errors of what did not parse."""
        return self.format.parse(self._without_stop_token(token_ids), tools=tools, id_prefix=id_prefix)

    def demonstration(self, messages: Sequence[Message], tools: _Tools = ()) -> tuple[list[int], list[int]]:
        """(token_ids [T], action_mask [T]) of a whole scripted episode, by the same code path as a rollout.

        Assistant turns and their close token have mask 1, all else 0. Messages after the last assistant turn are not
        rendered, since a rollout would not show them to the model. Raises ValueError without an assistant message.
        """
        turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
        if not turns:
            raise ValueError("a demonstration needs at least one assistant message")
        token_ids = self.first_prompt(messages[: turns[0]], tools)
        mask = [0] * len(token_ids)
        turn_ids: list[int] = []
        for n, index in enumerate(turns):
            if n:
                seen = self.observation(messages[turns[n - 1] + 1 : index], previous=turn_ids)
                token_ids += seen
                mask += [0] * len(seen)
            turn_ids = self.turn(messages[index])
            token_ids += turn_ids
            mask += [1] * len(turn_ids)
        return token_ids, mask

    def turn(self, message: Message) -> list[int]:
        """A whole assistant turn as the model should write it, with the token that ends it unless a stop text does."""
        text = self.format.write(message)
        ids = self.encode_assistant(text)
        return ids if any(stop in text for stop in self.format.stop) else [*ids, self.close_id]

    def encode_assistant(self, text: str) -> list[int]:
        """Text as the model writes it: a marker such as `<tool_call>` is one token where the vocabulary has it."""
        return self._codec.encode_parts(self._codec.assistant_parts(text))

    def assistant_text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without the stop token at its end."""
        return self.decode(self._without_stop_token(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens spelled out."""
        return self._codec.decode(token_ids)

    def count(self, text: str) -> int:
        """Tokens of `text` as content."""
        return self._codec.count(text)

    def truncate(self, text: str, max_tokens: int, *, keep: str = "both") -> str:
        """At most `max_tokens` tokens of `text`: see Codec.truncate."""
        return self._codec.truncate(text, max_tokens, keep=keep)

    def _without_stop_token(self, token_ids: Sequence[int]) -> Sequence[int]:
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return token_ids[:-1] if ended else token_ids


def load_tokenizer(model: ModelConfig, path: str | None = None) -> TurnTokenizer:
    """The tokenizer of a config's model, with its renderer and chat template variables.

    Training, `agentrl eval`, `agentrl rollout` and the report all load it here, so that they write the same prompts.

        tokenizer = load_tokenizer(config.model)

    Args:
        path: a folder or hub name to load instead of `model.path`, such as one that a warm start has just written.

    Raises ConfigError as TurnTokenizer.load does.
    """
    return TurnTokenizer.load(path or model.path, renderer=model.renderer, template_args=model.chat_template_args)


_USER = Message(role="user", content="x")


def _choose(codec: Codec, tokenizer: Any, renderer: str, template_args: dict[str, Any], path: str) -> Strategy:
    """The first strategy that passes its checks. Raises ConfigError with the failure of each."""
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
    """A strategy that has passed its checks. Raises ConfigError."""
    eos_id: int | None = tokenizer.eos_token_id
    if way == "raw":
        strategy: Strategy = RawStrategy(codec, bos_id=tokenizer.bos_token_id, eos_id=eos_id, name=path)
        check_strategy(codec, strategy, whole=None)
        return strategy
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {path} has no chat template; add chat_template.jinja to the folder")
    template = _template(tokenizer, template_args)
    if way == "template":
        strategy = TemplateStrategy(codec, template, name=path)
    else:
        strategy = library_turns.load_strategy(codec, way, eos_id=eos_id, template_args=template_args)
    check_strategy(
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
