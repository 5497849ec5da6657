"""Tool calls with made-up arguments that fit the schema, to try an environment's tools. Independent of environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.tools import ToolSpec
from agentrl.types import Message, ToolCall

TEXT = "print(1 + 1)"
"""The text argument: a program, for tools that run code."""
_MAX_DEPTH = 8


def calling(spec: ToolSpec, *, text: str = TEXT) -> Message:
    """One turn that calls a tool with its required arguments.

    Example:
        message = calling(Capitals.tools["look_up"])
    """
    arguments = _example(spec.schema()["function"].get("parameters", {}), text, 0)
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="0", name=spec.name, arguments=arguments),))


def _example(schema: Mapping[str, Any], text: str, depth: int) -> Any:
    """A value that fits the common kinds of schema: the tool answers with an error where it does not."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], text, depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object" | None if depth < _MAX_DEPTH:
            properties = schema.get("properties", {})
            return {name: _example(properties.get(name, {}), text, depth + 1) for name in schema.get("required", ())}
        case "array":
            items = schema.get("items")
            count = schema.get("minItems", 1)
            return (
                [_example(items, text, depth + 1)] * count if isinstance(items, Mapping) and depth < _MAX_DEPTH else []
            )
        case "integer" | "number":
            return schema.get("minimum", min(1, schema.get("maximum", 1)))
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return text
