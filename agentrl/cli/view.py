"""`agentrl view`: what runs left behind, for people and for programs. Shows what agentrl/view reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, guarded

if TYPE_CHECKING:
    from agentrl.view.run_reader import RunReader

PORT = 7788
Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...", help="Folders of runs, or their names; default: the newest.", show_default=False
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="QUERY",
        help="Print a table, one JSON object a line, e.g. 'episodes?reward<1&sort=-turns&limit=5'. Tables: runs, "
        "steps, evals, events, episodes, groups, messages, tokens, ledger, problems. Signs: = != < <= > >= and ~ for "
        "a text that is in it; fields=A,B chooses columns.",
        show_default=False,
    ),
]
Bundle = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Write a copy that opens without a server: a folder with everything, or, where PATH ends in .html, one "
        "file with a sample of the groups.",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on. Any but loopback needs AGENTRL_TOKEN.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]


def view(
    runs: Runs = None,
    query: Json = None,
    bundle: Bundle = None,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    debug: Debug = False,
) -> None:
    """Show the episodes, groups, tokens, curves and ledger of runs. Only reads: a run may be running or damaged."""

    def show() -> None:
        readers = _readers(runs or [])
        if query is not None:
            _print_table(readers, query)
        elif bundle is not None:
            _write(readers, bundle)
        else:
            _serve(readers, host, port)

    guarded(show, debug=debug, interrupted="the page is no longer served; runs are not touched")


def _readers(runs: list[Path]) -> list[RunReader]:
    from agentrl.run_folder import RunFolder
    from agentrl.supervision.status import newest_run
    from agentrl.view.run_reader import RunReader

    return [RunReader(RunFolder.open(run)) for run in runs or [newest_run()]]


def _print_table(readers: list[RunReader], query: str) -> None:
    import msgspec

    from agentrl.view.tables import ask

    encoder = msgspec.json.Encoder()
    for row in ask(readers, query):
        typer.echo(encoder.encode(row).decode())


def _write(readers: list[RunReader], folder: Path) -> None:
    from agentrl.view.bundle import write_bundle, write_one_file
    from agentrl.view.documents import Documents

    if folder.suffix == ".html":
        held, total = write_one_file(Documents(readers), folder)
        typer.echo(f"{folder} ({folder.stat().st_size / 1e6:.1f} MB, {held} of {total} groups)")
        return
    size = write_bundle(Documents(readers), folder)
    typer.echo(f"{folder / 'index.html'} ({size / 1e6:.1f} MB in the folder)")


def _serve(readers: list[RunReader], host: str, port: int) -> None:
    import asyncio
    import os
    from urllib.parse import quote

    from agentrl.api.blocking import blocking
    from agentrl.supervision import secrets
    from agentrl.supervision.serving import serving
    from agentrl.view.documents import Documents
    from agentrl.view.server import create_app

    token = secrets.read(secrets.RUN, os.environ)
    secrets.require(token, host=host, key="--host", name=secrets.RUN)
    asked = None if secrets.is_loopback(host) else token

    async def serve() -> None:
        async with serving(create_app(Documents(readers), token=asked), host=host, port=port) as url:
            typer.echo(f"{url}/{f'?token={quote(asked)}' if asked else ''}   (Ctrl-C ends it)")
            await asyncio.Event().wait()

    blocking(serve())
