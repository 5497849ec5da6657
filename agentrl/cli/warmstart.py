"""`agentrl warmstart`: joins or starts a sandbox, then lets the trainer make the small model. Trains nothing itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.supervision import secrets

if TYPE_CHECKING:
    from sandbox.client import SandboxClient


async def make_model(
    config: Config, *, out: Path | None, sandbox_url: str | None, progress_json: bool, if_missing: bool = False
) -> None:
    """Make the model at `out`. Raises ConfigError when the folder exists or the config has no warm start.

    With `if_missing` these two are not errors: there is nothing to do.
    """
    from trainer.warmstart.train import warmstart

    if if_missing and (config.model.warmstart is None or ((out or Path(config.model.path)) / "config.json").is_file()):
        return
    if config.model.warmstart is None:
        raise ConfigError("model.warmstart: the config has no such section; `warmstart: {}` takes the defaults")
    target = out or Path(config.model.path)
    async with _sandbox(config, sandbox_url) as sandbox:
        if progress_json:
            report = await warmstart(config, out=target, sandbox=sandbox, progress=_print_progress)
        else:
            console = EvalConsole()
            with console.progress("learning from demonstrations") as advance:
                report = await warmstart(config, out=target, sandbox=sandbox, progress=advance)
            console.line(report.describe())


def _print_progress(done: int, total: int) -> None:
    sys.stdout.write(json.dumps([done, total]) + "\n")
    sys.stdout.flush()


@asynccontextmanager
async def _sandbox(config: Config, url: str | None) -> AsyncIterator[SandboxClient]:
    from sandbox.client import SandboxClient

    if url is not None:
        async with SandboxClient(url, token=secrets.read(secrets.SANDBOX, os.environ)) as client:
            yield client
    else:
        settings = config.sandbox
        async with SandboxClient.embedded(settings.backend, settings.slots, allow_unsafe=settings.allow_unsafe) as own:
            yield own
