"""Tool calls with made-up arguments that fit the schema, and what is odd about the answers. Independent of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.tools import ToolSpec
from agentrl.types import Message, ToolCall

TEXT = "print(1 + 1)"
"""The text argument: a program, for tools that run code."""
LONG_OUTPUT = 100_000
"""Characters of a tool's answer, beyond which there is a warning."""
_MAX_DEPTH = 8


def calling(spec: ToolSpec, *, text: str = TEXT) -> Message:
    """One turn that calls a tool with its required arguments.

    Example:
        message = calling(Capitals.tools["look_up"])
    """
    arguments = _example(spec.schema()["function"].get("parameters", {}), text, 0)
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="0", name=spec.name, arguments=arguments),))


def calls_with_text(tools: Mapping[str, ToolSpec], text: str) -> list[Message]:
    """One turn that calls the first tool whose only required argument is text; none when there is no such tool."""
    for spec in tools.values():
        parameters = spec.schema()["function"]["parameters"]
        required = parameters.get("required", [])
        if len(required) == 1 and parameters["properties"][required[0]].get("type") == "string":
            return [calling(spec, text=text)]
    return []


def odd_output(tool: str, text: str) -> str | None:
    """A warning about what a tool answered."""
    if text == "null":
        return f"{tool} returned None, which the model reads as `null`: return text"
    if len(text) > LONG_OUTPUT:
        return (
            f"{tool} answered with {len(text) / 1e6:.1f} MB. The model is shown rollout.tool_output_tokens of it (128 "
            "by default), its first and its last part, and each call costs the time to cut it: return less"
        )
    return None


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
