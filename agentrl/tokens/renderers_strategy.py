"""Turns of a model family as the optional `renderers` package writes them (https://pypi.org/project/renderers).

The package renders placeholders instead of contents. Our codec, which it takes for its tokenizer, then inserts the
contents, so that they never become special tokens. A family is found by a model's hub name, or by the package's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.tokens.codec import Codec
from agentrl.tokens.strategies import Pieces, placeholder, split_pieces
from agentrl.tokens.tool_calls import THINK_CLOSE, format_message
from agentrl.types import Message, Role, user


class LibraryStrategy:
    """A Strategy over a renderer of the package. Raises ConfigError when it cannot write for this vocabulary.

    strategy = load_strategy(codec, "qwen3", eos_id=eos_id, template_args={})
    """

    def __init__(self, vocabulary: Vocabulary, renderer: Any, *, family: str) -> None:
        self.name = f"renderers' {family}"
        self._vocabulary = vocabulary
        self._codec = vocabulary.codec
        self._renderer = renderer
        self._opened = self.opening([user("x")], ())
        end_of_thought = [i for i in (self._codec.added_ids.get(THINK_CLOSE),) if i is not None]
        self._said = [*self._codec.encode("x"), *end_of_thought, *self._codec.encode("x")]
        self.close_id: int = self._after([user("x")])[0]
        if self.close_id not in renderer.get_stop_token_ids():
            raise ConfigError(f"{self.name} does not close a turn that was cut short")

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """See Strategy."""
        functions = [schema["function"] for schema in tools] or None
        bodies = self._vocabulary.hide(messages)
        return list(self._renderer.render_ids(bodies, tools=functions, add_generation_prompt=True))

    def tools_as_text(self, tools: Sequence[dict[str, Any]]) -> str:
        """See Strategy."""
        return self._codec.decode(self.opening([user("x")], tools))

    def following(self, messages: Sequence[Message], *, completion_ids: Sequence[int]) -> list[int]:
        """See Strategy. Raises ConfigError where the package would render the whole dialogue again.

        The package renders a turn of one word: what it writes after a turn must not depend on the turn's content.
        """
        ids = self._after(messages)
        return ids[1:] if completion_ids and completion_ids[-1] == self.close_id else ids

    def _after(self, messages: Sequence[Message]) -> list[int]:
        """Ids after an assistant turn that was cut short, its close token first."""
        bodies = self._vocabulary.hide(messages)
        bridged = self._renderer.bridge_to_next_turn(self._opened, list(self._said), bodies)
        known = [*self._opened, *self._said]
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            raise ConfigError(f"{self.name} does not append {[m.role for m in messages]} messages to what was said")
        return list(bridged.token_ids[len(known) :])

    def can_append(self, roles: Sequence[Role]) -> bool:
        """See Strategy."""
        try:
            self._after([Message(role=role, content="x") for role in roles])
        except ConfigError:
            return False
        return True


def family_of(model: str) -> str | None:
    """The package's name for the family of a hub model; None where the package is missing or does not know it."""
    if Path(model).exists():
        return None
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
        need = f"model.renderer={family!r} needs the renderers package"
        raise MissingDependencyError.of_extra(need, "renderers") from error
    try:
        config = config_from_name(family)
        fields = {"thinking_retention": "all", **template_args}
        settings = type(config).model_validate(fields) if config is not None else None
        vocabulary = Vocabulary(codec, eos_id)
        return LibraryStrategy(vocabulary, create_renderer(vocabulary, settings), family=family)
    except (ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"renderers' {family} cannot write for this vocabulary: {text}") from error


class Vocabulary:
    """The tokenizer interface that the package needs. Its own text is parsed for special tokens; contents never are.

    Example: `Vocabulary(codec, eos_id=2).encode("<|im_end|>")` is one id where the vocabulary has that token.
    """

    name_or_path = ""
    unk_token_id = None

    def __init__(self, codec: Codec, eos_id: int | None) -> None:
        self.codec = codec
        self.eos_token_id = eos_id
        self._hidden: list[Pieces] = []

    def hide(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages for the package, with placeholders for contents, which `encode` replaces from now on."""
        self._hidden = [
            self.codec.assistant_parts(format_message(m)) if m.role == "assistant" else [m.content] for m in messages
        ]
        return [
            {"role": m.role, "content": placeholder(i), **({"tool_call_id": m.tool_call_id} if m.tool_call_id else {})}
            for i, m in enumerate(messages)
        ]

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Ids of the package's text, with the hidden contents inserted."""
        parts: Pieces = []
        for piece in split_pieces(text):
            parts.extend(self._hidden[piece] if isinstance(piece, int) else self.codec.glue(piece))
        return self.codec.encode_parts(parts)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of ids, special tokens spelled out."""
        return self.codec.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of added tokens; None for one that the vocabulary does not have."""
        ids = self.codec.added_ids
        return ids.get(tokens) if isinstance(tokens, str) else [ids.get(token) for token in tokens]
