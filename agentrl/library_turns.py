"""Turns of a model family as the `renderers` package writes them (https://pypi.org/project/renderers). Optional.

The package gets our codec for its tokenizer, so that contents never become special tokens. It knows families by the
hub name of their models, or by its own name for the family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.codec import Codec
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.types import Message, Role, user


class LibraryStrategy:
    """A renderer of the package. Raises ConfigError when it cannot serve the vocabulary at hand."""

    def __init__(self, codec: Codec, renderer: Any, *, family: str) -> None:
        self.name = f"renderers' {family}"
        self._codec = codec
        self._renderer = renderer
        stops = list(renderer.get_stop_token_ids())
        spoken = codec.encode("x")
        with_close = renderer.bridge_to_next_turn(self.opening([user("x")], ()), spoken, [_body(user("x"))])
        closes = [i for i in (with_close.token_ids if with_close else ()) if i in stops]
        if not closes:
            raise ConfigError(f"{self.name} does not close a turn that was cut short")
        self._opened = self.opening([user("x")], ())
        self.close_id: int = with_close.token_ids[len(self._opened) + len(spoken)]

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """See Strategy."""
        functions = [schema["function"] for schema in tools] or None
        ids: list[int] = self._renderer.render_ids(
            [_body(message) for message in messages], tools=functions, add_generation_prompt=True
        )
        return list(ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """See Strategy."""
        text = self._codec.decode(self.opening([user("x")], tools))
        return all(schema["function"]["name"] in text for schema in tools)

    def following(self, messages: Sequence[Message], *, spoken: Sequence[int]) -> list[int]:
        """See Strategy. Raises ConfigError where the package would render the whole dialogue again."""
        before = self._opened
        bridged = self._renderer.bridge_to_next_turn(before, list(spoken), [_body(m) for m in messages])
        known = [*before, *spoken]
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            raise ConfigError(f"{self.name} does not append {[m.role for m in messages]} messages to what was said")
        return list(bridged.token_ids[len(known) :])

    def can_append(self, roles: Sequence[Role]) -> bool:
        """See Strategy."""
        try:
            self.following([Message(role=role, content="x") for role in roles], spoken=self._codec.encode("x"))
        except ConfigError:
            return False
        return True


def family_of(model: str) -> str | None:
    """The package's name for the family of a model of the hub; None where it is not installed or knows it not."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return None
    family: str | None = MODEL_RENDERER_MAP.get(model)
    return family


def load_strategy(
    codec: Codec, family: str, *, eos_id: int | None, template_args: Mapping[str, Any]
) -> LibraryStrategy:
    """The package's renderer for `family`. Raises ConfigError, MissingDependencyError."""
    try:
        from renderers import create_renderer
        from renderers.configs import config_from_name
    except ImportError as error:
        raise MissingDependencyError(
            f"model.renderer={family!r} is of the renderers package: pip install 'agentrl[renderers]'"
        ) from error
    try:
        config = config_from_name(family)
        fields = {"thinking_retention": "all", **template_args}
        settings = type(config).model_validate(fields) if config is not None else None
        renderer = create_renderer(_Vocabulary(codec, eos_id), settings)
        return LibraryStrategy(codec, renderer, family=family)
    except (ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"renderers' {family} cannot write for this vocabulary: {text}") from error


class _Vocabulary:
    """What the package wants of a tokenizer, without special-token parsing."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, codec: Codec, eos_id: int | None) -> None:
        self._codec = codec
        self.eos_token_id = eos_id

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._codec.encode(text)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._codec.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return (
            self._codec.added_ids.get(tokens) if isinstance(tokens, str) else [self._codec.added_ids[t] for t in tokens]
        )


def _body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body
