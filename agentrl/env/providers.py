"""Private tool arguments: what an episode gives its tools by type, and the model never sees.

Knows types and the methods that make them; nothing of schemas, calls or sandboxes.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.types import Task

_MARK = "__agentrl_provides__"
F = TypeVar("F", bound=Callable[..., Any])


def provide(method: F) -> F:
    """Give tools an argument of the method's return type: made at its first use, once an episode.

    A plain method, an `async` one, or an async generator that yields once (`-> AsyncIterator[T]`): what follows its
    `yield` is run when the episode is closed, whatever happened.
    """
    setattr(method, _MARK, True)
    return method


def collect_providers(cls: type) -> dict[type, str]:
    """Provided type -> name of the method that makes it, base classes first. Raises ConfigError for a bad one."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    methods = {name: getattr(cls, name, None) for name in names}
    return {_provided(method): name for name, method in methods.items() if getattr(method, _MARK, False)}


def _provided(method: Any) -> type:
    where = f"@provide {method.__qualname__}"
    try:
        hint = typing.get_type_hints(method).get("return")
    except NameError as error:
        raise ConfigError(f"{where}: {error}; types in its signature must be importable at run time") from error
    if inspect.isasyncgenfunction(method):
        if typing.get_origin(hint) not in (AsyncIterator, AsyncGenerator):
            raise ConfigError(f"{where}: an async generator needs the return type AsyncIterator[...]")
        hint = typing.get_args(hint)[0]
    if not isinstance(hint, type) or hint.__module__ == "builtins":
        raise ConfigError(f"{where}: needs a class of its own as return type, found {hint!r}: tools ask for it by type")
    return hint


@dataclass(kw_only=True)
class Scope:
    """What one episode holds for its tools."""

    task: Task | None = None
    seed: int | None = None
    made: dict[type, Any] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def get(self, kind: type, make: Callable[[], Any]) -> Any:
        """The episode's object of this type; `make` is called where there is none yet."""
        if kind not in self.made:
            if inspect.isasyncgenfunction(make):
                self.made[kind] = await self._stack.enter_async_context(asynccontextmanager(make)())
            else:
                made = make()
                self.made[kind] = await made if inspect.isawaitable(made) else made
        return self.made[kind]

    def on_close(self, close: Callable[[], Any]) -> None:
        """Await `close()` when the episode is closed, last one first."""
        self._stack.push_async_callback(close)

    async def close(self) -> None:
        """Let go of everything made, last one first. Safe to call twice."""
        self.made.clear()
        await self._stack.aclose()
