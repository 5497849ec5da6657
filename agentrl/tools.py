"""`@tool`: a method's signature and docstring become a JSON schema; arguments are validated before the call.

Independent of tool-call formats and episodes.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic
import pydantic_core

from agentrl.errors import ConfigError
from agentrl.supervision.threads import StopSignal, in_thread

_MARK = "__agentrl_tool__"
_ANYTHING: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Any)
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """Raise it in a tool for a mistake of the model, which reads the text; the call counts in `tool_errors`.

    Any other exception of a tool is a failure of the environment: the episode is played again and never scored.

        raise ToolError(f"there is no page {page}; pages: 1 to 30")
    """


class ToolArgumentError(ToolError, ValueError):
    """The model's arguments do not fit the schema: an observation, never a failure of the system.

    spec.validate({"limit": 3})  # ToolArgumentError: argument 'words' is missing
    """


def tool(method: F) -> F:
    """Make a method of a `ToolEnv` callable by the model.

        @tool
        async def search(self, words: Annotated[str, "what to look for"], limit: int = 3) -> list[str]:
            "Full-text search."

    Every parameter needs a type hint: plain types, enums, lists, dataclasses and pydantic models, nested as you like.
    The docstring is the description the model reads; `Args:` in it, or `Annotated[str, "what it is"]`, describes a
    parameter. A parameter of a private type (`Task`, `SandboxSession`, `StopSignal`) is not in the schema: the driver
    fills it in. The model receives the returned value, as JSON if it is not a string. A method that is not async runs
    in a thread.
    """
    setattr(method, _MARK, True)
    return method


def is_tool(method: object) -> bool:
    """Whether a method was marked with `@tool`."""
    return bool(getattr(method, _MARK, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool as the model sees it, with the pydantic class that validates its arguments.

    spec = MyEnv.tools["search"]
    await spec.call(env, {"words": "tower"})
    """

    name: str
    description: str
    arguments: type[pydantic.BaseModel]
    private: Mapping[str, type] = field(default_factory=dict)
    """Parameters that the model does not see, and their types."""

    def schema(self) -> dict[str, Any]:
        """OpenAI's function schema, which chat templates expect under `tools`. The same object on every call."""
        return _schema(self.name, self.description, self.arguments)

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Typed arguments for the call. Raises ToolArgumentError with a short sentence for the model."""
        try:
            model = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise ToolArgumentError("; ".join(_explain(item) for item in error.errors()[:3])) from error
        fields = type(model).model_fields.items()
        return {info.alias or name: getattr(model, name) for name, info in fields}

    async def call(
        self,
        owner: object,
        arguments: dict[str, Any],
        *,
        private: Callable[[type], Awaitable[Any]] | None = None,
    ) -> str:
        """Run the tool on `owner`. Raises ToolArgumentError before the call, and whatever the tool raises.

        Args:
            private: returns the value for a private parameter of a type.
        """
        typed = self.validate(arguments)
        stop = StopSignal()
        for name, kind in self.private.items():
            if kind is StopSignal:
                typed[name] = stop
            elif private is None:
                raise ConfigError(f"tool {self.name}: no value is provided for {kind.__name__}")
            else:
                typed[name] = await private(kind)
        method = getattr(owner, self.name)
        if inspect.iscoroutinefunction(method):
            result = await method(**typed)
        else:
            result = await in_thread(functools.partial(method, **typed), name=f"tool {self.name}", stop=stop)
        return result if isinstance(result, str) else self._as_json(result)

    def _as_json(self, result: Any) -> str:
        try:
            return _ANYTHING.dump_json(result).decode()
        except (pydantic_core.PydanticSerializationError, UnicodeError) as error:
            raise TypeError(
                f"it returned a value of type {type(result).__name__}, which cannot be shown to a model as JSON: "
                "return text, numbers, lists or dicts"
            ) from error


@functools.lru_cache(maxsize=4096)
def _schema(name: str, description: str, arguments: type[pydantic.BaseModel]) -> dict[str, Any]:
    parameters = _without_titles(_inlined(arguments.model_json_schema()))
    parameters.pop("additionalProperties", None)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def collect_tools(cls: type, *, private: Collection[type] = ()) -> dict[str, ToolSpec]:
    """The tools of a class, in order of definition, base classes first. Raises ConfigError for an untyped parameter.

    `private` are the types that the driver fills in; parameters of these types are not in the schema.
    """
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    methods: dict[str, Any] = {name: getattr(cls, name, None) for name in names}
    return {name: _spec(method, name, private) for name, method in methods.items() if is_tool(method)}


def _spec(function: Callable[..., Any], name: str, private: Collection[type]) -> ToolSpec:
    where = f"tool {function.__qualname__}{_place(function)}"
    if not (docstring := inspect.cleandoc(function.__doc__ or "")):
        raise ConfigError(f"{where} has no docstring, the description that the model reads: write one below the `def`")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: {error}; types in its signature must be importable at run time") from error
    names = list(inspect.signature(function).parameters)
    if not names or (names[0] != "self" and names[0] in hints):
        raise ConfigError(f"{where}: its first parameter must be `self`: write `({', '.join(['self', *names])})`")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{where}: *{parameter.name} has no schema; name the parameters")
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: parameter {parameter.name!r} needs a type hint, such as `{parameter.name}: str`"
            )
    hidden = {p.name: hints[p.name] for p in parameters if hints[p.name] in (*private, StopSignal)}
    description, texts = _read_docstring(docstring, [p.name for p in parameters], where)
    shown = [p for p in parameters if p.name not in hidden]
    arguments = _arguments_model(name, shown, hints, texts, where)
    return ToolSpec(name=name, description=description, arguments=arguments, private=hidden)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _arguments_model(
    name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any], texts: Mapping[str, str], where: str
) -> type[pydantic.BaseModel]:
    """The pydantic class of the arguments. Fields are numbered and have aliases: a parameter may be named `schema`."""
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        hint, text = _described(hints[parameter.name])
        default = ... if parameter.default is parameter.empty else parameter.default
        info = pydantic.Field(default, alias=parameter.name, description=text or texts.get(parameter.name))
        fields[f"p{index}"] = (hint, info)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False, validate_by_name=False)
    try:
        arguments: type[pydantic.BaseModel] = pydantic.create_model(f"{name}_arguments", __config__=config, **fields)
        arguments.model_json_schema()
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ConfigError(f"{where}: no JSON schema can be made: {str(error).splitlines()[0]}") from error
    return arguments


def _described(hint: Any) -> tuple[Any, str | None]:
    """Split `Annotated[str, "text"]` into type and text; other annotations stay as they are."""
    metadata = getattr(hint, "__metadata__", ())
    texts = [item for item in metadata if isinstance(item, str)]
    if not texts:
        return hint, None
    rest = [item for item in metadata if not isinstance(item, str)]
    bare = typing.Annotated[(hint.__origin__, *rest)] if rest else hint.__origin__
    return bare, " ".join(texts)


def _read_docstring(docstring: str, names: list[str], where: str) -> tuple[str, dict[str, str]]:
    """The description, and the texts of parameters where the docstring has them (Google, NumPy or Sphinx style)."""
    if not re.search(r"^\s*(Args|Arguments|Params|Parameters):?\s*$|^\s*:param ", docstring, re.MULTILINE):
        return docstring, {}
    import docstring_parser

    parsed = docstring_parser.parse(docstring)
    if not parsed.params:
        return docstring, {}
    texts = {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}
    if unknown := sorted(texts.keys() - set(names)):
        raise ConfigError(f"{where}: its docstring describes {unknown[0]!r}, which is not a parameter")
    returns = parsed.returns.description if parsed.returns else None
    parts = (parsed.short_description, parsed.long_description, f"Returns: {returns}" if returns else None)
    return "\n\n".join(part for part in parts if part), texts


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with nested types in place of references: small models do not follow references.

    A type that contains itself stays a reference.
    """
    definitions = schema.get("$defs", {})

    def resolve(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [resolve(item, inside) for item in node]
        if not isinstance(node, dict):
            return node
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in definitions and name not in inside:
            siblings = {k: v for k, v in node.items() if k != "$ref"}
            return {**resolve(definitions[name], (*inside, name)), **resolve(siblings, inside)}
        return {k: resolve(v, inside) for k, v in node.items()}

    inlined: dict[str, Any] = resolve({k: v for k, v in schema.items() if k != "$defs"}, ())
    return inlined | {"$defs": definitions} if '"$ref"' in _ANYTHING.dump_json(inlined).decode() else inlined


def _without_titles(node: Any) -> Any:
    """The schema without pydantic's `title` of every field, which only costs tokens. A property named title stays."""
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
