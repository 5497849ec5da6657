"""`agentrl.check_env`: checks an environment before anyone trains on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl import check
from agentrl.api.blocking import blocking
from agentrl.check import Check, CheckReport
from agentrl.env import Env
from agentrl.env.registry import checked_class
from agentrl.errors import ConfigError
from agentrl.report.observer import Advance


def check_env(
    target: str | type[Env],
    *,
    data: str | Path | None = None,
    limit: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    timeout_s: float = check.TIMEOUT_S,
    on_begin: Callable[[str], None] = lambda name: None,
    on_check: Callable[[Check], None] = lambda check: None,
    progress: Advance = lambda done, total: None,
) -> CheckReport:
    """Check an environment, like `agentrl env check`, with a sandbox of its own.

    A target is checked in a process of its own, which is ended if the environment blocks it. A class, which may exist
    in this process only, is checked here: code of it that blocks the event loop cannot be ended.

    Args:
        target: the class, `module:Class`, `path/to/file.py:Class`, or a registered id.
        data: rows: a file, a set's name, hf:owner/name.
        limit: only the first rows.
        kwargs: arguments of the constructor, as `env.kwargs` in a config.
        tokenizer: folder or hub name of the model whose turns are checked; None: bytes with ChatML turns.
        timeout_s: deadline of each call of a method. After a call that misses it, the checks end.
        on_begin: called with the name of each check when it begins.
        on_check: called with each result as it comes.
        progress: called with (rows done, rows in total).

    A check that fails is in the report, not an exception. Raises ConfigError for a target or data that cannot be read.

    Example:
        report = agentrl.check_env("my_env.py:MyEnv")
        assert report.ok, [check for check in report.checks if not check.ok]
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: give the number of rows, or None for all")
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s={timeout_s}: give a number of seconds, such as {check.TIMEOUT_S:g}")
    options: dict[str, Any] = {
        "data": None if data is None else str(data),
        "limit": limit,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "timeout_s": timeout_s,
        "on_begin": on_begin,
        "on_check": on_check,
        "progress": progress,
    }
    if isinstance(target, str):
        return blocking(check.check_target(target, kwargs=kwargs, **options))
    if not (isinstance(target, type) and issubclass(target, Env)):
        raise ConfigError(f"{target!r} is neither an Env class nor a text such as 'path/to/file.py:Class'")
    return blocking(_check_class(checked_class(target, kwargs or {}), options))


async def _check_class(env_class: type[Env], options: Mapping[str, Any]) -> CheckReport:
    from sandbox.client import SandboxClient

    async with SandboxClient.embedded() as sandbox:
        return await check.check_env(env_class, sandbox=sandbox, **options)
