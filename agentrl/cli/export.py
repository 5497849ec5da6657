"""`agentrl export`: episodes of runs for other programs. Asks agentrl/view/export.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.cli.options import Debug, guarded

Format = Literal["jsonl", "parquet", "atif", "trace"]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or their names.")]
To = Annotated[
    Format,
    typer.Option(
        help="jsonl, parquet: a row of messages for each segment of an episode, as fine-tuning takes them. atif: a "
        "folder of Harbor's trajectory documents, with token ids and logprobs. trace: the timeline of one run, for "
        "ui.perfetto.dev.",
        show_default=False,
    ),
]
Where = Annotated[
    str,
    typer.Option(
        metavar="CONDITIONS",
        help="Which episodes, by the columns of `agentrl view --json episodes`, e.g. "
        "'reward>=1&stop_reason=completed&env=envs.modmath:ModMath'. Without a condition on kind: of training only.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Default: RUN.jsonl, RUN.parquet, RUN-atif, RUN-trace.json.", show_default=False),
]


def export(runs: Runs, to: To, where: Where = "", out: Out = None, debug: Debug = False) -> None:
    """Write episodes for other programs: rows of messages for fine-tuning, ATIF, or a trace. Only reads the runs."""

    def write() -> None:
        from agentrl.run_folder import RunFolder
        from agentrl.view.export import export as export_from
        from agentrl.view.run_reader import RunReader

        readers = [RunReader(RunFolder.open(run)) for run in runs]
        target = out or Path(_default_name(readers[0].name, to))
        written = export_from(readers, to, target, where=where, version=_version())
        for problem in written.problems:
            typer.echo(f"left out: {problem}", err=True)
        unit = {"atif": "documents", "trace": "steps"}.get(to, "rows")
        typer.echo(f"{written.path} ({written.episodes} episodes, {written.rows} {unit})")

    guarded(write, debug=debug, interrupted="nothing was written; runs are not touched")


def _default_name(run: str, to: Format) -> str:
    return {"atif": f"{run}-atif", "trace": f"{run}-trace.json"}.get(to, f"{run}.{to}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from agentrl.errors import DISTRIBUTION

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was not installed
        return "0"
