"""`agentrl env ...`: list, write, check and play environments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Data, Debug, guarded, run
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.check import CheckReport

CLOSED = "the episode was closed"

env_app = typer.Typer(help="Environments: list them, write one, check it, play it.", no_args_is_help=True)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="module:Class, path/to/file.py:Class, or a registered id.", show_default=False
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the constructor, like env.kwargs in a config."),
]


def _kwargs(arguments: list[str] | None) -> dict[str, Any]:
    """The arguments by name; values are YAML, as in a config's overrides. Raises ConfigError."""
    import yaml

    found: dict[str, Any] = {}
    for argument in arguments or []:
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--arg {argument!r} is not of the form NAME=VALUE")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--arg {argument!r}: the value is not valid YAML: {error}") from error
    return found


@env_app.command(name="list")
def env_list() -> None:
    """All registered environments: id, class, what it is."""
    guarded(_show_environments, debug=False)


def _show_environments() -> None:
    """A table in a terminal; elsewhere one line for each, for programs that read them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentrl.env import specs
    from agentrl.env.registry import summary

    console = Console(highlight=False)
    table = Table("id", "class", "what it is", box=None, pad_edge=False)
    for spec in specs():
        cells = (spec.id, spec.entry_point, summary(spec.load()))
        if console.is_terminal:
            table.add_row(*map(Text, cells))
        else:
            console.print(Text("  ".join(cells)), soft_wrap=True)
    if console.is_terminal:
        console.print(table)
    console.print("Your own: module:Class or path/to/file.py:Class; `agentrl env new NAME` writes one.", soft_wrap=True)


@env_app.command(name="new")
def env_new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the class, such as RiverCrossing.", show_default=False)
    ],
    tool: Annotated[bool, typer.Option("--tool/--no-tool", help="With a tool, or a plain dialogue.")] = True,
    folder: Annotated[Path, typer.Option("--in", help="Folder to write the file into.")] = Path(),
    debug: Debug = False,
) -> None:
    """Write a commented environment that works: tasks, tool, score, demonstrations. Overwrites nothing."""
    from agentrl.cli.env_new import write_environment

    path, class_name = guarded(lambda: write_environment(name, folder, tool=tool), debug=debug)
    typer.echo(f"{path} is an environment that works: change what you like. Next:")
    typer.echo(f"  agentrl env check {path}:{class_name}")
    typer.echo(f"  agentrl env play {path}:{class_name}")
    run = f"name={path.stem} env.target={path}:{class_name} model.path=models/{path.stem}"
    typer.echo(f"  agentrl train configs/quickstart.yaml {run}")
    typer.echo(f"The last one writes runs/{path.stem}/, with report.html; `agentrl status {path.stem}` follows it.")


@env_app.command(name="check")
def env_check(
    target: Target,
    data: Data = None,
    arguments: Arguments = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Check the turns of this model's tokenizer; default: bytes with ChatML turns.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Deadline of each call of a method, in seconds.")] = 8.0,
    debug: Debug = False,
) -> None:
    """Check an environment: each method once, tools, seeds, clean-up, tokens, and the gold answer of every task."""
    kwargs = guarded(lambda: _kwargs(arguments), debug=debug)
    report = guarded(
        lambda: _check(target, kwargs=kwargs, data=data, limit=limit, tokenizer=tokenizer, timeout_s=timeout),
        debug=debug,
    )
    if not report.ok:
        raise typer.Exit(1)


def _check(target: str, **options: Any) -> CheckReport:
    """Make the checks and print each result as it comes. `options` are those of `agentrl.check_env`."""
    from rich.text import Text

    from agentrl import api
    from agentrl.check import Check
    from agentrl.report.console import EvalConsole

    console = EvalConsole()
    current = "loading"
    styles = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}

    def begin(name: str) -> None:
        nonlocal current
        current = name

    def show(check: Check) -> None:
        console.line(Text.assemble((f"{check.level:<5}", styles[check.level]), f"{check.name}: {check.detail}"))

    try:
        with console.phase("checking") as advance:
            report = api.check_env(target, on_begin=begin, on_check=show, progress=advance, **options)
    except KeyboardInterrupt:
        console.line(f"stopped during the check: {current}")
        raise typer.Exit(130) from None
    if report.printed:
        console.line(f"what the environment printed, to its end:\n{report.printed}")
    return report


@env_app.command(name="play")
def env_play(
    target: Target,
    data: Data = None,
    arguments: Arguments = None,
    task: Annotated[int, typer.Option(min=0, help="Number of the test task.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
    debug: Debug = False,
) -> None:
    """Play the agent yourself: what you type stands for the model's message; call tools as tool(arg=...) or JSON."""
    from agentrl.cli.env_play import play_in_terminal

    kwargs = guarded(lambda: _kwargs(arguments), debug=debug)
    playing = play_in_terminal(target, kwargs=kwargs, data=data, index=task, seed=seed)
    run(playing, debug=debug, interrupted=CLOSED)
