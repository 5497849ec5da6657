"""Tool calls as text: parsing, and its inverse, formatting. Hermes JSON, and blocks of code.

Nothing is repaired: what does not parse is reported, never guessed. Independent of tokens, schemas and environments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentrl.types import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# strict=False: models write raw newlines inside the JSON string that holds their code
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """A parsed assistant turn. A malformed call stays in `content`, and `errors` has one line about it.

    parse_hermes('<tool_call>{"name": "f", "arguments": {}}</tool_call>').tool_calls[0].name  # "f"
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]


def parse_hermes(
    text: str, *, id_prefix: str = "call", thinking: bool = False, openers: Sequence[int] | None = None
) -> ParsedText:
    """Split a turn into its text and its calls, in order.

    Calls inside `<think>` do not count. The JSON is decoded from the opener onwards, so code that contains
    `</tool_call>` in a string is no problem.

    Args:
        thinking: whether the prompt already opened a thought.
        openers: positions of the real openers, by the token record; None: every `<tool_call>` is one.
    """
    if openers is None:
        openers = [match.start() for match in re.finditer(re.escape(OPEN), text)]
    calls: list[ToolCall] = []
    errors: list[str] = []
    kept: list[str] = []
    position = _after_thought(text, thinking=thinking)
    kept.append(text[:position])
    for start in openers:
        if start < position:
            continue
        kept.append(text[position:start])
        try:
            name, arguments, end = _decode_call(text, start + len(OPEN))
        except ValueError as error:
            errors.append(str(error))
            end = text.find(CLOSE, start)
            end = len(text) if end < 0 else end + len(CLOSE)
            kept.append(text[start:end])
        else:
            calls.append(ToolCall(id=f"{id_prefix}_{len(calls)}", name=name, arguments=arguments))
        position = end
    kept.append(text[position:])
    content = "".join(kept).rstrip("\n") if calls else "".join(kept)
    return ParsedText(content=content, tool_calls=tuple(calls), errors=tuple(errors))


def parse_code(text: str, block: CodeBlock, *, name: str, argument: str, id_prefix: str = "call") -> ParsedText:
    """Split a turn into its text and its first block of code, as a call of `name`.

    Code in thoughts counts: models that write code this way reason with it (SimpleTIR, arXiv 2509.02479; ReTool,
    arXiv 2504.11536).
    """
    match = block.pattern.search(text)
    if match is None:
        return ParsedText(content=text, tool_calls=(), errors=block.trouble(text))
    arguments = {argument: match["code"]}
    try:
        msgspec.msgpack.encode(arguments)
    except ValueError as error:  # a lone surrogate
        return ParsedText(content=text, tool_calls=(), errors=(f"the code cannot be recorded: {error}",))
    call = ToolCall(id=f"{id_prefix}_0", name=name, arguments=dict(arguments))
    content = text[: match.start()].rstrip("\n") + text[match.end() :].rstrip("\n")
    return ParsedText(content=content, tool_calls=(call,), errors=())


def format_code(content: str, tool_calls: Sequence[ToolCall], block: CodeBlock) -> str:
    """The text a model writes for this turn: the inverse of `parse_code`. Raises ValueError for a call without code."""
    if not tool_calls:
        return content
    if len(tool_calls) != 1 or len(tool_calls[0].arguments) != 1:
        raise ValueError("a block of code is one call with one argument")
    code = str(next(iter(tool_calls[0].arguments.values())))
    return f"{content}\n{block.wrap(code)}" if content else block.wrap(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """How a block of code is written in a text.

    >>> FENCE.wrap("print(1)")
    '```python\\nprint(1)\\n```\\n'
    """

    pattern: re.Pattern[str]
    """Matches a whole block; its group `code` is the code to run."""
    begins: str
    ends: str
    """Writing this ends the turn."""
    head: str
    tail: str

    def wrap(self, code: str) -> str:
        """Code as a block."""
        return f"{self.head}{code}{self.tail}"

    def trouble(self, text: str) -> tuple[str, ...]:
        """The error of a text that has an incomplete block; empty where none was begun."""
        if self.begins in text:
            return (f"the code block is not closed: it begins with {self.head!r} and ends with {self.tail!r}",)
        if self.ends in text:
            return (f"there is no code to run: a block begins with {self.head!r} and ends with {self.tail!r}",)
        return ()


FENCE = CodeBlock(
    pattern=re.compile(r"```(?:python|py)[ \t]*\n(?P<code>.*?)(?:\n|(?<=\n))```[ \t]*(?=\n|\Z)", re.DOTALL),
    begins="```py",
    ends="```\n",
    head="```python\n",
    tail="\n```\n",
)
RETOOL = CodeBlock(
    pattern=re.compile(r"<code>\s*?\n?(?:```(?:python|py)[ \t]*\n)?(?P<code>.*?)(?:\n?```\s*)?\n?</code>", re.DOTALL),
    begins="<code>",
    ends="</code>",
    head="<code>\n```python\n",
    tail="\n```\n</code>",
)


def format_hermes(content: str, tool_calls: Sequence[ToolCall]) -> str:
    """The text a model writes for this turn: the inverse of `parse_hermes`."""
    blocks = [
        f"{OPEN}\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n{CLOSE}"
        for call in tool_calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def format_message(message: Message) -> str:
    """`format_hermes` of an assistant message."""
    return format_hermes(message.content, message.tool_calls)


def _after_thought(text: str, *, thinking: bool) -> int:
    if not thinking and not text.lstrip().startswith(THINK_OPEN):
        return 0
    end = text.find(THINK_CLOSE)
    return len(text) if end < 0 else end + len(THINK_CLOSE)


def _decode_call(text: str, start: int) -> tuple[str, dict[str, object], int]:
    """Name, arguments, and the end of the block. Raises ValueError with a sentence for the model."""
    start = _skip_space(text, start)
    try:
        call, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"the tool call is not valid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError("the tool call is nested too deeply") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a tool call is an object {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call['name']!r} must be an object")
    try:
        msgspec.msgpack.encode(call)
    except (ValueError, OverflowError) as error:  # a lone surrogate, or an integer beyond 64 bits
        raise ValueError(f"the arguments of {call['name']!r} cannot be recorded: {error}") from error
    end = _skip_space(text, end)
    if not text.startswith(CLOSE, end):
        raise ValueError(f"the tool call is not closed with {CLOSE}")
    return call["name"], arguments, end + len(CLOSE)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
