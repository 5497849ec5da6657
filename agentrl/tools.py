"""`@tool`: a method's signature and docstring become a JSON schema; arguments are validated before the call.

Knows nothing of formats (how a model writes a call) or of episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic

from agentrl.errors import ConfigError

_MARK = "__agentrl_tool__"
F = TypeVar("F", bound=Callable[..., Any])


class ToolArgumentError(ValueError):
    """The model's arguments do not fit the schema. An observation, never a failure of the system."""


def tool(method: F) -> F:
    """Offer a method of a `ToolEnv` to the model.

    Every parameter needs a type hint (`Annotated[str, "what it is"]` adds a description); the docstring is the
    description the model reads. The method returns what the model shall see; a value that is not a string is shown
    as JSON. A method that is not async runs in a thread.
    """
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool as the model sees it, with the model class that validates its arguments."""

    name: str
    description: str
    arguments: type[pydantic.BaseModel]

    def schema(self) -> dict[str, Any]:
        """OpenAI's function schema, what chat templates expect under `tools`."""
        parameters = _without_titles(self.arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Typed arguments for the call. Raises ToolArgumentError with a short sentence for the model."""
        try:
            model = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise ToolArgumentError("; ".join(_explain(item) for item in error.errors()[:3])) from error
        return {name: getattr(model, name) for name in type(model).model_fields}

    async def call(self, owner: object, arguments: dict[str, Any]) -> str:
        """Run the tool on `owner`. Raises ToolArgumentError before the call, whatever the tool raises after."""
        typed = self.validate(arguments)
        method = getattr(owner, self.name)
        if inspect.iscoroutinefunction(method):
            result = await method(**typed)
        else:
            result = await asyncio.to_thread(method, **typed)
        if isinstance(result, str):
            return result
        return pydantic.TypeAdapter(Any).dump_json(result).decode()


def collect_tools(cls: type) -> dict[str, ToolSpec]:
    """The tools of a class, in order of definition, base classes first. Raises ConfigError for an untyped parameter."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    methods: dict[str, Any] = {name: getattr(cls, name, None) for name in names}
    return {name: _spec(method, name) for name, method in methods.items() if getattr(method, _MARK, False)}


def _spec(function: Callable[..., Any], name: str) -> ToolSpec:
    where = f"tool {function.__qualname__}"
    description = inspect.cleandoc(function.__doc__ or "")
    if not description:
        raise ConfigError(f"{where} has no docstring: it is the description the model reads")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: {error}; types in its signature must be importable at run time") from error
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{where}: *{parameter.name} has no schema; name the parameters")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: parameter {parameter.name!r} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (_described(hints[parameter.name]), default)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        arguments = pydantic.create_model(f"{name}_arguments", __config__=config, **fields)
        arguments.model_json_schema()
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ConfigError(f"{where}: no JSON schema can be made: {str(error).splitlines()[0]}") from error
    return ToolSpec(name=name, description=description, arguments=arguments)


def _described(hint: Any) -> Any:
    """`Annotated[str, "text"]` as a pydantic field description; other annotations stay as they are."""
    texts = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, str)]
    if not texts:
        return hint
    return typing.Annotated[hint.__origin__, pydantic.Field(description=" ".join(texts))]


def _without_titles(node: Any) -> Any:
    """Pydantic names every field in `title`; a model's context has better uses. A property called title stays."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}


def _explain(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"argument {name!r} is missing"
    if item["type"] == "extra_forbidden":
        return f"there is no argument {name!r}"
    return f"argument {name!r}: {re.sub(r'^Input should be', 'should be', item['msg'])}"
