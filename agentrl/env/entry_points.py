"""Finds the environments and adapters that installed packages register. Does not depend on any of those packages.

A package registers in its pyproject.toml:

    [project.entry-points."agentrl.environments"]
    chess = "chess_envs.openings"                          # importing the module calls `register`

    [project.entry-points."agentrl.adapters"]
    chess = "chess_envs.adapter:from_chess"                # makes a class of `chess:REST`
"""

from __future__ import annotations

import functools
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
    """Scheme -> the entry point of its factory."""
    return {point.name: point for point in entry_points(group=ADAPTERS)}


def load_adapted(target: str, kwargs: Mapping[str, Any]) -> type[Env] | None:
    """The class that an adapter makes of `SCHEME:REST`, such as `gymnasium:FrozenLake-v1`; None for other targets.

    Args:
        kwargs: options of the adapter (`env.kwargs` in a config).

    Raises ConfigError for what cannot be adapted, an unknown option, or an adapter that cannot be imported.
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


def _failure(point: EntryPoint, error: Exception) -> str:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return f"{point.value}, an entry point of {package}, cannot be loaded: {type(error).__name__}: {error}"
