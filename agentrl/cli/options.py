"""What all commands share: common options, Ctrl-C, errors on one screen, exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from agentrl.errors import AgentRLError, ConfigError

T = TypeVar("T")
RUN_INTERRUPTED = "every part was stopped; what was finished is in the run folder"

ConfigPath = Annotated[Path, typer.Argument(help="YAML file, e.g. configs/quickstart.yaml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="e.g. learner.lr=1e-4 train.steps=20", show_default=False),
]
Latest = Annotated[
    Path | None,
    typer.Option(
        metavar="LINK",
        help="Keep a link to the run's folder here. If it leads to a run that is not over, that run continues.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

# Options of both `agentrl eval` and `agentrl rollout`: PlayOptions.
Model = Annotated[str | None, typer.Option(help="Folder, hub name, or URL of a running server.")]
ServedModel = Annotated[
    str | None, typer.Option(help="MODEL is any OpenAI-compatible chat endpoint (.../v1), and serves this name.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Environment variable with the endpoint's key; default OPENAI_API_KEY."),
]
Data = Annotated[str | None, typer.Option(help="Rows: a file, a set's name, hf:owner/name (docs/math.md).")]
Target = Annotated[str | None, typer.Option("--env", help="Another environment, module:Class.")]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer folder, where MODEL is a vLLM's URL.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """The options of both `agentrl eval` and `agentrl rollout`. None: as the config says.

    Example:
        PlayOptions(model="models/tiny", samples=4)
    """

    model: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    data: str | None = None
    target: str | None = None
    tokenizer: str | None = None
    samples: int | None = None  # of each task
    limit: int | None = None  # tasks


def run(work: Coroutine[Any, Any, T], *, debug: bool, interrupted: str = RUN_INTERRUPTED) -> T:
    """The result of asynchronous work. Prints `interrupted` after Ctrl-C, when the work has cleaned up."""
    return guarded(lambda: asyncio.run(_interruptible(work)), debug=debug, interrupted=interrupted)


class _Interrupted(Exception):
    """A signal to stop arrived, and the work has cleaned up."""


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Cancel the work on Ctrl-C, SIGTERM (a container stops) and SIGHUP (a terminal closes), so that it cleans up.

    Python's own handler for Ctrl-C is missing where a shell started the process in the background.
    """
    task = asyncio.ensure_future(work)
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    for number in (signal.SIGINT, signal.SIGTERM, *(() if is_kept else (signal.SIGHUP,))):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise _Interrupted from None
        raise


def guarded(work: Callable[[], T], *, debug: bool, interrupted: str = RUN_INTERRUPTED) -> T:
    """Run the work. Show an error on one screen and exit with its code."""
    try:
        return work()
    except (KeyboardInterrupt, _Interrupted):
        typer.echo(f"interrupted: {interrupted}", err=True)
        raise typer.Exit(130) from None
    except ConfigError as error:
        fail(error, code=2, debug=debug)
    except AgentRLError as error:
        fail(error, code=1, debug=debug)


def fail(error: AgentRLError, *, code: int, debug: bool) -> NoReturn:
    """Show an error on one screen and exit with `code`. With `debug`, raise the error."""
    from agentrl.report.console import show_error

    if debug:
        raise error
    show_error(error)
    sys.exit(code)
