"""Other people's environments as ours, and ours as theirs. Knows which module serves a target; loads it late."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.env.base import Env

FACTORIES = {
    "gymnasium": "envs.adapters.from_gymnasium:from_gymnasium",
    "mcp": "envs.adapters.from_mcp:from_mcp",
    "openenv": "envs.adapters.from_openenv:from_openenv",
    "verifiers": "envs.adapters.from_verifiers:from_verifiers",
}
"""Before the colon of a target: the function that makes a class of the rest."""


def load(target: str, kwargs: Mapping[str, Any]) -> type[Env] | None:
    """The class that an adapter makes of `SCHEME:REST`, such as `gymnasium:FrozenLake-v1`; None for other targets.

    Args:
        kwargs: options of the adapter (`env.kwargs` in a config).

    Raises ConfigError for what cannot be adapted, an unknown option, or an extra that is not installed.
    """
    from agentrl.errors import ConfigError

    scheme, colon, rest = target.partition(":")
    if not colon or scheme not in FACTORIES:
        return None
    module, _, name = FACTORIES[scheme].partition(":")
    factory = getattr(importlib.import_module(module), name)
    try:
        found: type[Env] = factory(rest, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{target} with env.kwargs={dict(kwargs)}: {error}") from error
    return found
