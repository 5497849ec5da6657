import dataclasses
import enum
import threading
from typing import Annotated, Any, Literal

import pydantic
import pytest

from agentrl.errors import ConfigError
from agentrl.supervision.threads import StopSignal
from agentrl.tools import ToolArgumentError, collect_tools, tool
from agentrl.types import Task


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


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


class Tree(pydantic.BaseModel):
    """A node."""

    name: str
    children: list["Tree"] = []


class Pen:
    @tool
    async def draw(
        self,
        points: list[Point],
        schema: Annotated[int, pydantic.Field(gt=0), "how thick"],
        colour: Colour = Colour.RED,
        copy: dict[str, list[int]] | None = None,
    ) -> str:
        """Draw lines.

        From point to point.

        Args:
            points: where
                they go
            colour: of the pen

        Returns:
            What was drawn.
        """
        return repr((points, schema, colour, copy))

    @tool
    async def plant(self, tree: Tree) -> int:
        """Plant.

        :param tree: what to plant
        """
        return len(tree.children)


PEN = collect_tools(Pen)


def test_nested_types_enums_and_defaults_are_written_where_they_are_used() -> None:
    function = PEN["draw"].schema()["function"]
    assert function["description"] == "Draw lines.\n\nFrom point to point.\n\nReturns: What was drawn."
    point = {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
        "required": ["x"],
    }
    items = {
        key: value for key, value in function["parameters"]["properties"]["points"]["items"].items() if key in point
    }
    assert items == point
    assert function["parameters"]["properties"]["points"]["description"] == "where they go"
    assert function["parameters"]["properties"]["schema"] == {
        "type": "integer",
        "exclusiveMinimum": 0,
        "description": "how thick",
    }
    assert function["parameters"]["properties"]["colour"] == {
        "type": "string",
        "enum": ["red", "blue"],
        "default": "red",
        "description": "of the pen",
    }
    assert function["parameters"]["required"] == ["points", "schema"]
    assert "$defs" not in function["parameters"]


def test_a_type_that_contains_itself_stays_a_reference() -> None:
    parameters = PEN["plant"].schema()["function"]["parameters"]
    tree = parameters["properties"]["tree"]
    assert tree["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert list(parameters["$defs"]) == ["Tree"]
    assert tree["description"] == "what to plant"


async def test_nested_arguments_arrive_as_their_types() -> None:
    arguments = {"points": [{"x": 1}], "schema": 2, "colour": "blue", "copy": {"a": [1]}}
    assert await PEN["draw"].call(Pen(), arguments) == repr(([Point(1.0, 0.0)], 2, Colour.BLUE, {"a": [1]}))
    assert await PEN["plant"].call(Pen(), {"tree": {"name": "a", "children": [{"name": "b"}]}}) == "1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"points": [{"y": 1}]}, "argument 'points.0.x' is missing"),
        ({"schema": 0}, "argument 'schema': should be greater than 0"),
        ({"colour": "green"}, "should be 'red' or 'blue'"),
        ({"p0": []}, "there is no argument 'p0'"),
    ],
)
def test_nested_arguments_are_checked(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ToolArgumentError, match=reason):
        PEN["draw"].validate({"points": [], "schema": 1, **change})


def test_a_docstring_that_describes_no_parameter_of_the_tool_is_refused() -> None:
    def method(self: Any, code: str) -> str:
        """Run.

        Args:
            cod: the code
        """
        return code

    with pytest.raises(ConfigError, match="describes 'cod', which is not a parameter"):
        collect_tools(type("Bad", (), {"method": tool(method)}))


class State:
    """Of an episode."""


class Secretive:
    @tool
    async def look(self, where: str, state: State, stop: StopSignal, task: Task) -> str:
        """Look.

        Args:
            where: to look
            state: not for the model
        """
        return f"{where} {type(state).__name__} {stop.is_set()} {task.id}"


async def test_private_arguments_are_in_no_schema_and_cannot_be_given() -> None:
    spec = collect_tools(Secretive, private=(State, Task))["look"]
    assert list(spec.schema()["function"]["parameters"]["properties"]) == ["where"]
    assert spec.private == {"state": State, "stop": StopSignal, "task": Task}
    with pytest.raises(ToolArgumentError, match="there is no argument 'task'"):
        await spec.call(Secretive(), {"where": "up", "task": {"id": "mine", "prompt": ""}})

    async def private(kind: type) -> Any:
        return State() if kind is State else Task(id="t", prompt="")

    assert await spec.call(Secretive(), {"where": "up"}, private=private) == "up State False t"
