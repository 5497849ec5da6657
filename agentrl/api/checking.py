"""`agentrl.check_env`: checks an environment before anyone trains on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.api.blocking import blocking
from agentrl.check import CheckReport
from agentrl.check import check_env as check
from agentrl.env import Env, load_env_class
from agentrl.report.observer import Advance


def check_env(
    target: str | type[Env],
    *,
    data: str | None = None,
    limit: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    progress: Advance = lambda done, total: None,
) -> CheckReport:
    """Check an environment, like `agentrl env check`, with a sandbox of its own.

    Args:
        target: the class, `module:Class`, `path/to/file.py:Class`, or a registered id.
        data: rows: a file, a set's name, hf:owner/name.
        limit: only the first rows.
        kwargs: arguments of the constructor, as `env.kwargs` in a config.
        tokenizer: folder or hub name of the model whose turns are checked; None: bytes with ChatML turns.
        progress: called with (rows done, rows in total).

    A check that fails is in the report, not an exception. Raises ConfigError for a target or data that cannot be read.

    Example:
        report = agentrl.check_env("my_env.py:MyEnv")
        assert report.ok, [check for check in report.checks if not check.ok]
    """
    env_class = load_env_class(target, dict(kwargs or {})) if isinstance(target, str) else target
    return blocking(_check(env_class, data=data, limit=limit, tokenizer=tokenizer, progress=progress))


async def _check(
    env_class: type[Env], *, data: str | None, limit: int | None, tokenizer: str | None, progress: Advance
) -> CheckReport:
    from sandbox.client import SandboxClient

    async with SandboxClient.embedded() as sandbox:
        return await check(env_class, data=data, sandbox=sandbox, limit=limit, tokenizer=tokenizer, progress=progress)
