"""`agentrl env check`: runs check.py's checks on a class with a real sandbox, and shows what they found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from agentrl.check import check_env
from agentrl.env import load_env_class
from agentrl.report.console import EvalConsole


async def check_environment(
    target: str, *, kwargs: Mapping[str, Any], data: str | None, limit: int | None, tokenizer: str | None
) -> bool:
    """Whether every check passed. Raises ConfigError for a target or data file that is wrong."""
    from sandbox.client import SandboxClient

    env_class = load_env_class(target, kwargs)
    console = EvalConsole()
    async with SandboxClient.embedded() as sandbox:
        with console.progress("checking") as advance:
            report = await check_env(
                env_class,
                data=data,
                sandbox=sandbox,
                limit=limit,
                tokenizer=tokenizer,
                progress=advance,
            )
    for check in report.checks:
        mark = ("ok   ", "green") if check.ok else ("FAIL ", "bold red")
        console.line(Text.assemble(mark, f"{check.name}: {check.detail}"))
    return report.ok
