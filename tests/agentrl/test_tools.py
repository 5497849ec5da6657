import threading
from typing import Annotated, Any, Literal

import pytest

from agentrl.errors import ConfigError
from agentrl.tools import ToolArgumentError, collect_tools, tool


class Box:
    @tool
    async def search(
        self,
        query: Annotated[str, "what to look for"],
        limit: int = 3,
        title: str | None = None,
        order: Literal["new", "old"] = "new",
    ) -> dict[str, Any]:
        """Search the index.

        Best match first.
        """
        return {"query": query, "limit": limit, "order": order}

    @tool
    def thread(self) -> str:
        """Name of the thread."""
        return threading.current_thread().name


TOOLS = collect_tools(Box)


def test_the_schema_is_openais() -> None:
    assert TOOLS["search"].schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the index.\n\nBest match first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer", "default": 3},
                    "title": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                    "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "'query' is missing"),
        ({"query": "x", "page": 1}, "there is no argument 'page'"),
        ({"query": 5}, "argument 'query'"),
        ({"query": "x", "limit": "many"}, "argument 'limit'"),
        ({"query": "x", "order": "best"}, "argument 'order'"),
    ],
)
async def test_arguments_are_checked_before_the_call(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ToolArgumentError, match=reason):
        await TOOLS["search"].call(Box(), arguments)


async def test_results_that_are_not_text_are_shown_as_json() -> None:
    shown = await TOOLS["search"].call(Box(), {"query": "é"})
    assert shown == '{"query":"é","limit":3,"order":"new"}'


async def test_a_plain_method_runs_in_a_thread() -> None:
    assert await TOOLS["thread"].call(Box(), {}) != threading.main_thread().name


def test_a_subclass_inherits_overrides_and_removes_tools() -> None:
    class Small(Box):
        thread = None  # type: ignore[assignment]

        @tool
        async def search(self, word: str) -> str:  # type: ignore[override]
            """Another search."""
            return word

    assert list(collect_tools(Small)) == ["search"]
    assert collect_tools(Small)["search"].description == "Another search."


def _no_hint(self: Any, code) -> str:  # type: ignore[no-untyped-def]
    """Doc."""
    return ""


def _no_docstring(self: Any, code: str) -> str:
    return code


def _star(self: Any, *codes: str) -> str:
    """Doc."""
    return ""


def _no_schema(self: Any, lock: threading.Event) -> str:
    """Doc."""
    return ""


def _unknown_type(self: Any, code: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Doc."""
    return ""


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (_unknown_type, "'Nowhere' is not defined"),
        (_no_hint, "type hint"),
        (_no_docstring, "docstring"),
        (_star, "has no schema"),
        (_no_schema, "JSON schema"),
    ],
)
def test_a_method_that_cannot_be_described_is_a_config_error(method: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        collect_tools(type("Bad", (), {"method": tool(method)}))
