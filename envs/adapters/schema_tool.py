"""A tool that is described only by a JSON schema, as servers describe theirs. Independent of protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import jsonschema
import pydantic
from jsonschema.validators import validator_for
from referencing import Registry

from agentrl.errors import ConfigError, EnvError
from agentrl.tools import ToolArgumentError, ToolSpec

MAX_SHOWN_CHARS = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaTool(ToolSpec):
    """A tool whose schema is offered and checked as it is."""

    parameters: Mapping[str, Any]
    run: Callable[[Any, dict[str, Any]], Awaitable[str]]
    """(the environment, the arguments) -> the text for the model. Raises ToolError, EnvError."""
    arguments: type[pydantic.BaseModel] = pydantic.BaseModel  # unused: `parameters` defines what is valid

    def schema(self) -> dict[str, Any]:
        """OpenAI's function schema with `parameters`."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments, unchanged. Raises ToolArgumentError with a short sentence for the model."""
        kind = validator_for(self.parameters, default=jsonschema.Draft202012Validator)
        validator = kind(self.parameters, registry=Registry())  # an empty registry fetches nothing
        errors = sorted(validator.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
        if errors:
            raise ToolArgumentError("; ".join(_explain(error) for error in errors[:3]))
        return arguments

    async def call(
        self,
        owner: object,
        arguments: dict[str, Any],
        *,
        private: Callable[[type], Awaitable[Any]] | None = None,
    ) -> str:
        """Check the arguments, then call `run`. Raises ToolArgumentError, and whatever `run` raises."""
        return await self.run(owner, self.validate(arguments))


def check_schema(schema: Mapping[str, Any], *, where: str) -> None:
    """Raises ConfigError if `schema` is not a JSON schema."""
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{where} has an invalid JSON schema: {error.message}") from error


def asked(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask a server before any episode, also while an event loop runs already.

    Raises ConfigError if `ask` raises EnvError: a run whose server is unreachable cannot start.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            answers.append(await ask())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=lambda: asyncio.run(run()), name="ask a server")
    thread.start()
    thread.join()
    if not errors:
        return answers[0]
    if isinstance(errors[0], EnvError):
        raise ConfigError(str(errors[0])) from errors[0]
    raise errors[0]


def _explain(error: jsonschema.ValidationError) -> str:
    place = ".".join(map(str, error.path))
    shown = error.message if len(error.message) <= MAX_SHOWN_CHARS else f"{error.message[:MAX_SHOWN_CHARS]}..."
    return f"argument {place!r}: {shown}" if place else shown
