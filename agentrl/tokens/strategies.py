"""Turns of a dialogue as tokens: by the suffix difference of a chat template, or as raw text.

The template is rendered with placeholders in the place of contents. Only the template's own text (the glue) may produce
added tokens such as `<|im_end|>`. The text that follows an assistant turn's placeholder in a synthetic dialogue is the
text to append after a real turn (suffix difference), so nothing the model said is ever tokenized again. Independent of
engines and tool formats.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from agentrl.errors import ConfigError
from agentrl.tokens.codec import Codec
from agentrl.tokens.tool_calls import format_message
from agentrl.types import Message, Role

Template = Callable[[list[dict[str, Any]], "list[Any] | None", bool], str]
"""(messages, tools, add_generation_prompt) -> text. May raise whatever the template raises."""
Pieces = list[str | int]
"""Glue texts, and between them the index of each content."""

# Private-use characters: no template writes them, and none strips or splits them.
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
_ARGUMENT = "\ue002"
_PROBE = '"\n\\.'
"""A template that writes contents as JSON changes this text."""
OBSERVATIONS: tuple[tuple[Role, ...], ...] = (("tool",), ("tool", "tool"), ("user",))
MAX_OPENINGS = 256
"""Rendered openings that are cached, by roles and tools."""
_Calls = Literal["none", "objects", "texts"]
"""How a synthetic assistant turn before tool messages holds its calls: none, arguments as objects, or as JSON text."""


class Strategy(Protocol):
    """Turns of one model family as token ids.

    ids = strategy.opening([user("What is 2 + 2?")], tools=())
    ids += completion_ids
    ids += strategy.following([user("Sure?")], completion_ids=completion_ids)
    """

    name: str
    close_id: int
    """The token that ends an assistant turn."""

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a whole dialogue, generation prompt included. Raises ConfigError when it cannot be written."""

    def tools_as_text(self, tools: Sequence[dict[str, Any]]) -> str:
        """The text of an opening with these tools; empty where the strategy cannot describe tools."""

    def following(self, messages: Sequence[Message], *, completion_ids: Sequence[int]) -> list[int]:
        """New ids after an assistant turn of `completion_ids`: its close token if it was cut short, then `messages`."""

    def can_append(self, roles: Sequence[Role]) -> bool:
        """Whether messages of `roles` are written the same way after every dialogue."""


class TemplateStrategy:
    """A Strategy: the suffix difference of a chat template.

    A template that refuses a `tool` message alone gets one with the calls it answers. One without that role gets tool
    output as a user message; one without a system role gets the system text in the first user message. Raises
    ConfigError with the reason when none of this works.

        strategy = TemplateStrategy(codec, template, name="Qwen/Qwen2.5-0.5B-Instruct")
    """

    def __init__(self, codec: Codec, template: Template, *, name: str) -> None:
        self.name = f"template of {name}"
        self._codec = codec
        self._template = template
        self._cache: dict[tuple[Role, ...], Pieces] = {}
        self._openings: dict[tuple[tuple[Role, ...], bytes], Pieces] = {}
        self._calls: _Calls = "none"
        self._has_tool_role = True
        self._json_roles: set[Role] = set()
        self._has_system = self._takes(("system", "user"))
        self.close_id, self._close = self._find_close()
        self._settle_tools()
        self._json_roles = {role for role in self._roles() if self._writes_json(role)}

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """See Strategy. Raises ConfigError if the template drops or repeats a content."""
        messages = self._adapted(messages)
        if self._calls != "none" and any(message.role == "tool" for message in messages):
            return self._grown(messages, tools)
        key = (tuple(m.role for m in messages), msgspec.json.encode(tools))
        if key not in self._openings:
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            self._openings[key] = split_pieces(self._render(key[0], tools=list(tools)))
        return self._encode(self._openings[key], messages)

    def _grown(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """A dialogue with tool output, built turn by turn as in a rollout: synthetic calls never reach a model."""
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns or messages[turns[0] - 1].role == "tool":
            raise ConfigError(f"the {self.name} needs an assistant turn before a tool message")
        ids = self.opening(messages[: turns[0]], tools)
        for start, end in zip(turns, [*turns[1:], len(messages)], strict=True):
            turn = self._codec.encode_parts(self._content(messages[start]))
            ids += [*turn, *self.following(messages[start + 1 : end], completion_ids=turn)]
        return ids

    def tools_as_text(self, tools: Sequence[dict[str, Any]]) -> str:
        """See Strategy."""
        return self._render(["user"], tools=list(tools))

    def following(self, messages: Sequence[Message], *, completion_ids: Sequence[int]) -> list[int]:
        """See Strategy."""
        messages = self._adapted(messages)
        ids = self._encode(self._after(tuple(m.role for m in messages)), messages)
        return ids[1:] if completion_ids and completion_ids[-1] == self.close_id else ids

    def can_append(self, roles: Sequence[Role]) -> bool:
        """See Strategy."""
        try:
            return self._changes_with_history(self._as_written(roles)) is None
        except ConfigError:  # a dialogue rendered as a whole may still be accepted
            return False

    def _roles(self) -> tuple[Role, ...]:
        return (*(("system",) if self._has_system else ()), "user", *(("tool",) if self._has_tool_role else ()))

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in roles that the template has."""
        out: list[Message] = []
        for message in messages:
            role, content = message.role, message.content
            if role == "tool" and not self._has_tool_role:
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            elif role == "system" and not self._has_system:
                role = "user"
            if role == "user" != message.role and out and out[-1].role == "user":
                out[-1] = Message(role="user", content=f"{out[-1].content}\n{content}")
            elif role == "user" and out and out[-1].role == "user" and not self._has_system:
                out[-1] = Message(role="user", content=f"{out[-1].content}\n\n{content}")
            else:
                out.append(message if role == message.role else Message(role=role, content=content))
        return out

    def _as_written(self, roles: Sequence[Role]) -> tuple[Role, ...]:
        return tuple(m.role for m in self._adapted([Message(role=role, content="") for role in roles]))

    def _takes(self, roles: Sequence[Role]) -> bool:
        try:
            self._render(roles)
        except ConfigError:
            return False
        return True

    def _find_close(self) -> tuple[int, str]:
        """The token that ends an assistant turn in the template, and its text."""
        _, _, rest = self._render(("user", "assistant", "user")).partition(placeholder(1))
        found = self._codec.glue(rest)
        if found and isinstance(found[0], str) and not found[0].strip():
            del found[0]
        if not found or not isinstance(found[0], int):
            raise ConfigError(f"the {self.name} does not end an assistant turn with a special token")
        return found[0], next(text for text, i in self._codec.added_ids.items() if i == found[0])

    def _settle_tools(self) -> None:
        """Choose the first way to write tool messages that does not depend on the dialogue before them."""
        reasons = []
        ways: tuple[_Calls, ...] = ("none", "objects", "texts")
        for self._calls in ways:
            reason = self._refusal()
            if reason is None:
                return
            reasons.append(reason)
        self._calls, self._has_tool_role = "none", False
        if (reason := self._refusal()) is not None:
            raise ConfigError(f"the {self.name} cannot be trained with: {'; '.join(dict.fromkeys([*reasons, reason]))}")

    def _refusal(self) -> str | None:
        self._cache.clear()
        try:
            return next(
                (reason for roles in OBSERVATIONS if (reason := self._changes_with_history(self._as_written(roles)))),
                None,
            )
        except ConfigError as error:
            return str(error)

    def _changes_with_history(self, roles: tuple[Role, ...]) -> str | None:
        longer: tuple[Role, ...] = ("user", "assistant", *self._as_written(("tool",)), "assistant")
        expected = self._after(roles)
        found = [self._glue_after(longer, roles)]
        if self._has_system:
            # A template may show the system text with the newest message only; then only the opening contains it.
            with contextlib.suppress(ConfigError):
                found.append(self._glue_after(("system", "user", "assistant"), roles))
        if any(pieces != expected and not _repeats_earlier(pieces) for pieces in found):
            return f"what it writes before {list(roles)} messages changes with the dialogue before them"
        return None

    def _writes_json(self, role: Role) -> bool:
        """Whether contents of `role` are written as a JSON string. Raises ConfigError when they change otherwise."""
        roles: tuple[Role, ...] = (role,)
        if role != "user":
            roles = ("user", "assistant", "tool") if role == "tool" else ("system", "user")
        index = roles.index(role)
        text = self._render(roles, extra={index: _PROBE})
        after = text.partition(placeholder(index))[2]
        if after.startswith(_PROBE):
            return False
        if after.startswith(_escaped(_PROBE)):
            return True
        raise ConfigError(f"the {self.name} rewrites the content of {role} messages")

    def _after(self, roles: tuple[Role, ...]) -> Pieces:
        """Glue after the content of an assistant turn followed by messages of `roles`, with the generation prompt."""
        if roles not in self._cache:
            self._cache[roles] = self._glue_after(("user", "assistant"), roles)
        return self._cache[roles]

    def _glue_after(self, before: tuple[Role, ...], roles: tuple[Role, ...]) -> Pieces:
        """Pieces from the close token of the last turn of `before` on, when messages of `roles` follow.

        Contents are numbered from 0; a negative number is a content of `before` that the template repeats.
        """
        text = self._render([*before, *roles])
        last = placeholder(len(before) - 1)
        end = text.rfind(last) + len(last) if last in text else 0
        first = text.find(placeholder(len(before)), end)
        end = max(end, text.rfind(_ARGUMENT, 0, first if first >= 0 else None) + 1)
        close = text.find(self._close, end)
        if not end or close < 0:
            raise ConfigError(f"the {self.name} does not end an assistant turn before roles {list(roles)}")
        if not self._calls_in(before, roles) and text[end:close].strip():
            raise ConfigError(f"the {self.name} writes {text[end:close]!r} after what the model said")
        return [p - len(before) if isinstance(p, int) else p for p in split_pieces(text[close:])]

    def _calls_in(self, before: Sequence[Role], roles: Sequence[Role]) -> bool:
        return self._calls != "none" and roles[:1] == ("tool",) and before[-1] == "assistant"

    def _render(
        self, roles: Sequence[Role], *, tools: list[Any] | None = None, extra: dict[int, str] | None = None
    ) -> str:
        """The template's text with a placeholder for each content; `extra` texts follow some of them."""
        messages = _synthetic(roles, self._calls, extra or {})
        try:
            text = self._template(messages, tools or None, True)
        except Exception as error:  # jinja2 errors of any kind: the template refuses this dialogue
            raise ConfigError(f"the {self.name} refuses roles {list(roles)}: {error}") from error
        wanted = {i for i, message in enumerate(messages) if not message.get("tool_calls")}
        found = [int(i) for i in _PLACEHOLDER.findall(text)]
        if not wanted <= set(found) or len(found) != len(set(found)):
            raise ConfigError(f"the {self.name} drops or repeats a content in roles {list(roles)}")
        return text

    def _encode(self, pieces: Pieces, messages: Sequence[Message]) -> list[int]:
        parts: Pieces = []
        for piece in pieces:
            parts.extend(self._content(messages[piece]) if isinstance(piece, int) else self._codec.glue(piece))
        return self._codec.encode_parts(parts)

    def _content(self, message: Message) -> Pieces:
        """The parts of a message: markers are tokens in assistant messages and text in all others."""
        if message.role == "assistant":
            return self._codec.assistant_parts(format_message(message))
        return [_escaped(message.content) if message.role in self._json_roles else message.content]


class RawStrategy:
    """A Strategy without a template: contents follow each other as text, as a base model reads them.

    Append-only by construction. Raises ConfigError for a vocabulary without an end-of-text token.

        strategy = RawStrategy(codec, bos_id=None, eos_id=0, name="my-base-model")
    """

    def __init__(self, codec: Codec, *, bos_id: int | None, eos_id: int | None, name: str) -> None:
        self.name = f"raw text of {name}"
        if eos_id is None:
            raise ConfigError(f"the {self.name} cannot be trained with: the tokenizer has no end-of-text token")
        self.close_id = eos_id
        self._codec = codec
        self._start = [] if bos_id is None else [bos_id]

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """See Strategy."""
        parts: Pieces = []
        for message in messages:
            is_assistant = message.role == "assistant"
            parts += self._codec.assistant_parts(format_message(message)) if is_assistant else [message.content]
            parts.append("\n\n")
        return [*self._start, *self._codec.encode_parts(parts)]

    def tools_as_text(self, tools: Sequence[dict[str, Any]]) -> str:
        """See Strategy."""
        return ""

    def following(self, messages: Sequence[Message], *, completion_ids: Sequence[int]) -> list[int]:
        """See Strategy. The model's turn is not closed: the text continues with the messages."""
        return self._codec.encode("\n\n" + "".join(f"{message.content}\n\n" for message in messages))

    def can_append(self, roles: Sequence[Role]) -> bool:
        """See Strategy."""
        return "assistant" not in roles


def _synthetic(roles: Sequence[Role], calls: _Calls, extra: dict[int, str]) -> list[dict[str, Any]]:
    """A dialogue of placeholders. Unless `calls` is "none", every tool message answers a call."""
    messages: list[dict[str, Any]] = []
    for i, role in enumerate(roles):
        message: dict[str, Any] = {"role": role, "content": placeholder(i) + extra.get(i, "")}
        if role == "tool" and calls != "none":
            asking = next(m for m in reversed(messages) if m["role"] == "assistant")
            asked = asking.setdefault("tool_calls", [])
            arguments: Any = {"x": _ARGUMENT}
            function = {"name": "tool", "arguments": json.dumps(arguments, ensure_ascii=False)}
            function |= {"arguments": arguments} if calls == "objects" else {}
            call_id = f"call{len(asked):05}"
            asked.append({"id": call_id, "type": "function", "function": function})
            message |= {"tool_call_id": call_id, "name": "tool"}
        messages.append(message)
    return messages


def placeholder(index: int) -> str:
    """The text that replaces content `index` while a template is rendered."""
    return f"\ue000{index}\ue001"


def split_pieces(text: str) -> Pieces:
    """Split rendered text into glue and content indices."""
    parts = _PLACEHOLDER.split(text)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _repeats_earlier(pieces: Pieces) -> bool:
    return any(isinstance(piece, int) and piece < 0 for piece in pieces)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
