"""Tool-call formats: the instructions, the stop texts, and how calls and their answers are written.

hermes: `<tool_call>` JSON in the chat template's own turns. fences and retool: code in the middle of one long
assistant turn, with its output appended as raw text and no template between (SimpleTIR, arXiv 2509.02479; ReTool, arXiv
2504.11536). Independent of engines and environments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from agentrl.errors import ConfigError
from agentrl.tokens.codec import Codec
from agentrl.tokens.strategies import RawStrategy, Strategy
from agentrl.tokens.tool_calls import (
    FENCE,
    OPEN,
    RETOOL,
    CodeBlock,
    ParsedText,
    format_code,
    format_hermes,
    parse_code,
    parse_hermes,
)
from agentrl.types import Message, system

_Tools = Sequence[dict[str, Any]]

_HERMES_PROMPT = """You can call tools. Their signatures, as JSON Schema:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}
</tool_call>
The answer comes in <tool_response></tool_response>. When you are done, answer without a call."""
_FENCES_PROMPT = """You can run Python while you think. Write the code as
```python
CODE
```
and its output follows as "Code execution result:". Then go on. {does}"""
_RETOOL_PROMPT = """You can run Python while you think. Write the code as
<code>
```python
CODE
```
</code>
and its output follows in <interpreter></interpreter>. Then go on. {does}"""


class ToolFormat(Protocol):
    """One way to write calls and their answers.

    messages, tools = tool_format.opening([user("What is 6 * 7?")], env.tool_schemas())
    parsed = tool_format.parse(token_ids, tools=tools, id_prefix="call_0")
    """

    name: str
    stop: tuple[str, ...]
    """Texts that end a turn if the model has tools."""

    def opening(self, messages: Sequence[Message], tools: _Tools) -> tuple[list[Message], _Tools]:
        """The messages to render, with our instructions, and the tools that the template itself describes."""

    def parse(self, token_ids: Sequence[int], *, tools: _Tools, id_prefix: str) -> ParsedText:
        """Parse a turn, given without its stop token."""

    def write(self, message: Message) -> str:
        """An assistant message as the model should write it. Raises ValueError when the format cannot express it."""

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """An observation as messages for the strategy to render."""

    def continuation(self, messages: Sequence[Message]) -> str | None:
        """An observation as raw text that continues an open turn; None where it must be turns of its own."""


class HermesFormat:
    """The ToolFormat of Hermes and Qwen: `<tool_call>` JSON, answered by tool messages.

    Example: `HermesFormat(codec, strategy, thinking=False).parse(ids, tools=tools, id_prefix="call").tool_calls`.
    """

    name: str = "hermes"
    stop: tuple[str, ...] = ()

    def __init__(self, codec: Codec, strategy: Strategy, *, thinking: bool) -> None:
        self._codec = codec
        self._strategy = strategy
        self._thinking = thinking
        self._template_teaches: dict[bytes, bool] = {}

    def opening(self, messages: Sequence[Message], tools: _Tools) -> tuple[list[Message], _Tools]:
        """See ToolFormat. Instructions are added only if the template does not describe this format itself."""
        if not tools or self._teaches(tools):
            return list(messages), tools
        listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in tools)
        return with_instructions(messages, _HERMES_PROMPT.format(tools=listed)), ()

    def _teaches(self, tools: _Tools) -> bool:
        key = msgspec.json.encode(tools)
        if key not in self._template_teaches:
            text = self._strategy.tools_as_text(tools)
            self._template_teaches[key] = OPEN in text and all(schema["function"]["name"] in text for schema in tools)
        return self._template_teaches[key]

    def parse(self, token_ids: Sequence[int], *, tools: _Tools, id_prefix: str) -> ParsedText:
        """See ToolFormat. If the vocabulary has a token for `<tool_call>`, only that token opens a call."""
        text, openers = self._codec.decode_marked(token_ids, OPEN)
        return parse_hermes(text, id_prefix=id_prefix, thinking=self._thinking, openers=openers)

    def write(self, message: Message) -> str:
        """See ToolFormat."""
        return format_hermes(message.content, message.tool_calls)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """See ToolFormat."""
        return list(messages)

    def continuation(self, messages: Sequence[Message]) -> str | None:
        """See ToolFormat."""
        return None


class CodeFormat:
    """A ToolFormat of code in the text of one assistant turn, for environments with one tool of one argument.

    Example: `CodeFormat("fences", codec, block=FENCE, prompt=prompt, answer="\\n{text}\\n")`.
    """

    def __init__(self, name: str, codec: Codec, *, block: CodeBlock, prompt: str, answer: str) -> None:
        self.name = name
        self.stop: tuple[str, ...] = (block.ends,)
        self._codec = codec
        self._block = block
        self._prompt = prompt
        self._answer = answer

    def opening(self, messages: Sequence[Message], tools: _Tools) -> tuple[list[Message], _Tools]:
        """See ToolFormat. Raises ConfigError unless there is one tool with one argument."""
        if not tools:
            return list(messages), ()
        _the_argument(tools, self.name)
        does = tools[0]["function"].get("description", "")
        return with_instructions(messages, self._prompt.format(does=does)), ()

    def parse(self, token_ids: Sequence[int], *, tools: _Tools, id_prefix: str) -> ParsedText:
        """See ToolFormat."""
        text = self._codec.decode(token_ids)
        if not tools:
            return ParsedText(content=text, tool_calls=(), errors=())
        name, argument = _the_argument(tools, self.name)
        return parse_code(text, self._block, name=name, argument=argument, id_prefix=id_prefix)

    def write(self, message: Message) -> str:
        """See ToolFormat."""
        return format_code(message.content, message.tool_calls, self._block)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """See ToolFormat. A turn that the model closed is answered by a user message."""
        return [
            Message(role="user", content=self._answer.format(text=m.content).strip("\n")) if m.role == "tool" else m
            for m in messages
        ]

    def continuation(self, messages: Sequence[Message]) -> str | None:
        """See ToolFormat."""
        if any(message.role != "tool" for message in messages):
            return None
        return "".join(self._answer.format(text=message.content) for message in messages)


def _fences(codec: Codec, strategy: Strategy, *, thinking: bool) -> ToolFormat:
    answer = "\nCode execution result: {text}\n"
    return CodeFormat("fences", codec, block=FENCE, prompt=_FENCES_PROMPT, answer=answer)


def _retool(codec: Codec, strategy: Strategy, *, thinking: bool) -> ToolFormat:
    answer = "\n<interpreter>\n{text}\n</interpreter>\n"
    return CodeFormat("retool", codec, block=RETOOL, prompt=_RETOOL_PROMPT, answer=answer)


class _MakeFormat(Protocol):
    def __call__(self, codec: Codec, strategy: Strategy, *, thinking: bool) -> ToolFormat: ...


TOOL_FORMATS: Mapping[str, _MakeFormat] = {"hermes": HermesFormat, "fences": _fences, "retool": _retool}
"""The formats by their names in `rollout.tool_format`."""


def make_format(name: str, codec: Codec, strategy: Strategy, *, thinking: bool) -> ToolFormat:
    """The format with this name. auto: fences without a chat template, else hermes. Raises ConfigError if unknown."""
    if name == "auto":
        name = "fences" if isinstance(strategy, RawStrategy) else "hermes"
    if name not in TOOL_FORMATS:
        raise ConfigError(f"there is no tool format {name!r}; known: auto, {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name](codec, strategy, thinking=thinking)


def with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with `text` at the end of the system message, which is added if there is none."""
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [system(text), *messages]


def _the_argument(tools: _Tools, format_name: str) -> tuple[str, str]:
    """The names of the only tool and its only argument. Raises ConfigError."""
    arguments = list(tools[0]["function"].get("parameters", {}).get("properties", {}))
    if len(tools) != 1 or len(arguments) != 1:
        names = [schema["function"]["name"] for schema in tools]
        raise ConfigError(
            f"rollout.tool_format: {format_name} takes one tool with one argument, the code; this environment has "
            f"{names}. Use hermes"
        )
    return tools[0]["function"]["name"], arguments[0]
