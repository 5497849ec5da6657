"""What all commands share: common options, Ctrl-C, errors on one screen, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from agentrl.errors import AgentRLError, ConfigError

T = TypeVar("T")
NOTHING_LEFT = "every part was stopped"
RUN_INTERRUPTED = "every part was stopped; what was finished is in the run folder"

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml", show_default=False)
]
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

# Options of both `agentrl eval` and `agentrl rollout`.
Model = Annotated[str | None, typer.Option(help="Folder, hub name, or URL of a running server.")]
ServedModel = Annotated[
    str | None, typer.Option(help="MODEL is any OpenAI-compatible chat endpoint (.../v1), and serves this name.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Environment variable with the endpoint's key; default OPENAI_API_KEY."),
]
Data = Annotated[str | None, typer.Option(help="Rows: a file, a set's name, hf:owner/name (docs/math.md).")]
EvalSet = Annotated[str | None, typer.Option("--set", metavar="NAME", help="Only this one of the config's eval.sets.")]
Target = Annotated[str | None, typer.Option("--env", help="Another environment, module:Class.")]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer folder, where MODEL is a vLLM's URL.")]


def run(work: Coroutine[Any, Any, T], *, debug: bool, interrupted: str = RUN_INTERRUPTED) -> T:
    """The result of asynchronous work. Prints `interrupted` after Ctrl-C, when the work has cleaned up."""
    from agentrl.api.blocking import blocking

    return guarded(lambda: blocking(work), debug=debug, interrupted=interrupted)


def guarded(work: Callable[[], T], *, debug: bool, interrupted: str = RUN_INTERRUPTED) -> T:
    """Run the work. Show an error on one screen and exit with its code."""
    try:
        return work()
    except KeyboardInterrupt:
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
