"""Resources that all episodes of a process share: opened once, closed whatever happens. Independent of episodes."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.env import places
from agentrl.env.attribution import SIGNATURES, attributed
from agentrl.env.base import Env
from agentrl.env.driver import CLOSE_TIMEOUT_S
from agentrl.env.registry import WrapEnv, load_env_class, make
from agentrl.errors import EnvError

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 600.0


@asynccontextmanager
async def opened(
    target: str | type[Env],
    *,
    sandbox: SandboxClient | None = None,
    wrappers: Iterable[WrapEnv] = (),
    **kwargs: Any,
) -> AsyncIterator[Callable[[], Env]]:
    """Open the shared resources; yields the function that makes an environment for one episode.

    The arguments are those of `make`. Raises ConfigError; EnvError or SandboxError when `open_shared` fails or takes
    more than OPEN_TIMEOUT_S. A failure to close is logged: it must not hide how the work ended.

        async with opened("Search-v0") as make_env:
            episode = await play_script(make_env(), task, script)
    """
    env_class = load_env_class(target) if isinstance(target, str) else target
    name = f"{env_class.__name__}.open_shared"
    with attributed(name, method="open_shared", at=env_class.open_shared):
        manager: Any = env_class.open_shared()
    if not hasattr(manager, "__aenter__"):
        if inspect.iscoroutine(manager):
            manager.close()
        place = places.in_brackets(places.defined_at(env_class.open_shared))
        raise EnvError(f"{name} is not an asynchronous context manager: write `{SIGNATURES['open_shared']}`{place}")
    deadline = asyncio.timeout(OPEN_TIMEOUT_S)
    try:
        with attributed(name, passing=TimeoutError):
            async with deadline:
                shared = await manager.__aenter__()
    except TimeoutError as error:
        late = f"took more than {OPEN_TIMEOUT_S:g} s" if deadline.expired() else f"TimeoutError: {error}"
        place = places.in_brackets(places.raised_at(error) or places.defined_at(env_class.open_shared))
        raise EnvError(f"{name}: {late}{place}") from error
    try:
        yield partial(make, env_class, sandbox=sandbox, shared=shared, wrappers=tuple(wrappers), **kwargs)
    finally:
        await _leave(manager, name)


async def _leave(manager: Any, name: str) -> None:
    """Leave as after a success, so that the code after `yield` runs even without `try` and `finally` around it."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await manager.__aexit__(None, None, None)
    except Exception as error:
        place = places.in_brackets(places.raised_at(error))
        log.warning("%s: closing failed: %s: %s%s", name, type(error).__name__, error, place)
