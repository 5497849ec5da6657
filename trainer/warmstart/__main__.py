"""`python -m trainer.warmstart`, which `agentrl warmstart` executes: makes the small model of a config.

Joins or starts a sandbox, shows progress, and maps errors to exit codes as every command of `agentrl` does: 0 done,
1 a part failed, 2 the settings or files are wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl import config as configs
from agentrl.cli.options import Debug, Overrides, fail, run
from agentrl.cli.parsing import ConfigCommand
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.report.console import EvalConsole
from agentrl.supervision import secrets

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

INTERRUPTED = "nothing was written"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=ConfigCommand)
def main(
    config_path: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML config, or a run's config.json.", show_default=False)
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make; default model.path of the config.")] = None,
    sandbox_url: Annotated[str | None, typer.Option(help="A running sandbox; default: one is started.")] = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Nothing to do is no error.")] = False,
    progress_json: Annotated[
        bool, typer.Option("--progress-json", help="Print progress as JSON lists of done and total.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Make a small model from the environment's scripted demonstrations (supervised, a minute or two)."""
    config = configs.load(config_path, overrides or [])
    making = make_model(config, out=out, sandbox_url=sandbox_url, progress_json=progress_json, if_missing=if_missing)
    run(making, debug=debug, interrupted=INTERRUPTED)


async def make_model(
    config: Config, *, out: Path | None, sandbox_url: str | None, progress_json: bool, if_missing: bool
) -> None:
    """Make the model in the folder `out`, by default `model.path`.

    Raises ConfigError when the folder exists or the config has no warm start. With `if_missing` neither is an error:
    there is nothing to do.
    """
    target = out or Path(config.model.path)
    if if_missing and (config.model.warmstart is None or (target / "config.json").is_file()):
        return
    if config.model.warmstart is None:
        raise ConfigError("model.warmstart: the config has no such section; `warmstart: {}` takes the defaults")
    from trainer.warmstart.train import warmstart

    async with _sandbox(config, sandbox_url) as sandbox:
        if progress_json:
            await warmstart(config, out=target, sandbox=sandbox, progress=_print_progress)
            return
        console = EvalConsole()
        with console.phase("learning from demonstrations") as advance:
            report = await warmstart(config, out=target, sandbox=sandbox, progress=advance)
        console.line(report.describe())


def _print_progress(done: int, total: int) -> None:
    sys.stdout.write(json.dumps([done, total]) + "\n")
    sys.stdout.flush()


@asynccontextmanager
async def _sandbox(config: Config, url: str | None) -> AsyncIterator[SandboxClient]:
    """A client of the sandbox at `url`; without one, of a sandbox started for the time of the block."""
    from sandbox.client import SandboxClient

    if url is not None:
        async with SandboxClient(url, token=secrets.read(secrets.SANDBOX, os.environ)) as client:
            yield client
    else:
        settings = config.sandbox
        async with SandboxClient.embedded(settings.backend, settings.slots, allow_unsafe=settings.allow_unsafe) as own:
            yield own


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(prog_name="agentrl warmstart")
    except ConfigError as error:
        fail(error, code=2, debug="--debug" in sys.argv)
