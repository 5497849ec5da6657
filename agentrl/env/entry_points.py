"""Finds the environments and adapters that installed packages register. Does not depend on any of those packages.

A package registers in its pyproject.toml:

    [project.entry-points."agentrl.environments"]
    chess = "chess_envs.openings"                          # importing the module calls `register`

    [project.entry-points."agentrl.adapters"]
    chess = "chess_envs.adapter:from_chess"                # makes a class of `chess:REST`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentrl.env.base import Env
from agentrl.errors import ConfigError

ENVIRONMENTS = "agentrl.environments"
ADAPTERS = "agentrl.adapters"


@functools.cache
def register_installed() -> tuple[str, ...]:
    """Import every registered module, so that it registers its ids. Returns a line for each that failed.

    A package that cannot be imported hides no other one: the caller shows the lines where they matter.
    """
    failures = []
    for point in entry_points(group=ENVIRONMENTS):
        try:
            point.load()
        except Exception as error:
            failures.append(_failure(point, error))
    return tuple(failures)


@functools.cache
def adapters() -> Mapping[str, EntryPoint]:
    """Scheme -> the entry point of its factory. Raises ConfigError when two packages register the same scheme."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ADAPTERS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"two packages register the adapter {point.name!r}: {_package(other)} ({other.value}) and "
                f"{_package(point)} ({point.value}). Uninstall one of them"
            )
    return found


def load_adapted(target: str, kwargs: Mapping[str, Any]) -> type[Env] | None:
    """The class that an adapter makes of `SCHEME:REST`, such as `gymnasium:FrozenLake-v1`; None for other targets.

    Args:
        kwargs: options of the adapter (`env.kwargs` in a config).

    Raises ConfigError for what cannot be adapted, an unknown option, an adapter that cannot be imported, or two that
    have the same scheme.
    """
    scheme, colon, rest = target.partition(":")
    point = adapters().get(scheme) if colon else None
    if point is None:
        return None
    try:
        factory = point.load()
    except Exception as error:
        raise ConfigError(_failure(point, error)) from error
    try:
        found: type[Env] = factory(rest, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{target} with env.kwargs={dict(kwargs)}: {error}") from error
    return found


def adapter_summaries() -> dict[str, str]:
    """`SCHEME:` -> the first line of its factory's documentation; the error for an adapter that cannot be imported."""
    found: dict[str, str] = {}
    for scheme, point in sorted(adapters().items()):
        try:
            found[f"{scheme}:"] = (inspect.getdoc(point.load()) or "").partition("\n")[0]
        except Exception as error:
            found[f"{scheme}:"] = _failure(point, error)
    return found


def known_schemes() -> str:
    """For messages: the schemes of the installed adapters, and how to get agentrl's own where there are none."""
    if schemes := sorted(adapters()):
        return f"installed adapters: {', '.join(f'{scheme}:' for scheme in schemes)}"
    return "no adapter is installed; agentrl registers its own when it is installed itself (pip install -e .)"


def _failure(point: EntryPoint, error: Exception) -> str:
    problem = f"{type(error).__name__}: {error}"
    return f"{point.value}, an entry point of {_package(point)}, cannot be loaded: {problem}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
