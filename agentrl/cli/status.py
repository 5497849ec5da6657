"""`agentrl status`: shows a run from another terminal, once or live. supervision/status.py assesses it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, guarded

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentrl.supervision.status import Assessment, RunStatus

REFRESH_S = 1.0
SECOND_LOOK_S = 2.0
"""A silent run is read again after this time: the machine, and with it the run, may just have woken up."""
COLORS = {"running": "green", "done": "green", "stalled": "yellow", "stopped": "yellow", "dead": "red", "failed": "red"}


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run, or its name; default: the newest.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the run until it is over.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Show how a run is doing: what waits for what, lag, ledger. Exit code 1 when it failed, is dead or stalled."""
    from agentrl.run_folder import RunFolder
    from agentrl.supervision.status import newest_run

    def show() -> str:
        folder = newest_run() if run is None else RunFolder.open(run).path
        return _follow(folder, json=json) if watch else _once(folder, json=json)

    state = guarded(show, debug=debug, interrupted="the run continues")
    raise typer.Exit(1 if state in ("failed", "dead", "stalled") else 0)


def _once(folder: Path, *, json: bool) -> str:
    found, verdict = _look(folder)
    if json:
        typer.echo(_json(found, verdict))
    else:
        from rich.console import Console

        Console(highlight=False).print(_panel(found, verdict))
    return verdict.state


def _follow(folder: Path, *, json: bool) -> str:
    """Show the run until it is over. A stalled run may recover and a dead one may be resumed, so neither ends this."""
    from rich.console import Console
    from rich.live import Live

    found, verdict = _look(folder)
    if json:
        typer.echo(_json(found, verdict))
        while not found.ending:
            time.sleep(REFRESH_S)
            found, verdict = _look(folder)
            typer.echo(_json(found, verdict))
        return verdict.state
    with Live(_panel(found, verdict), console=Console(highlight=False), auto_refresh=False) as live:
        while not found.ending:
            time.sleep(REFRESH_S)
            found, verdict = _look(folder)
            live.update(_panel(found, verdict), refresh=True)
    return verdict.state


def _look(folder: Path) -> tuple[RunStatus, Assessment]:
    from agentrl.supervision.status import OLD_S, RunState, assess, read_status

    found = read_status(folder)
    verdict = assess(found, folder)
    if verdict.state is RunState.STALLED and found.age_s() > OLD_S:
        time.sleep(SECOND_LOOK_S)
        found = read_status(folder)
        verdict = assess(found, folder)
    return found, verdict


def _json(found: RunStatus, verdict: Assessment) -> str:
    import msgspec

    fields = {name: getattr(found, name) for name in found.__slots__}
    head = {"state": verdict.state, "sentence": verdict.sentence, "advice": verdict.advice, "age_s": found.age_s()}
    return msgspec.json.encode(head | fields).decode()


def _panel(found: RunStatus, verdict: Assessment) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, text in _rows(found, is_over=bool(found.ending) or verdict.state == "dead"):
        table.add_row(Text(name, style="dim"), Text(text))
    parts: list[RenderableType] = [Text(verdict.sentence, style=COLORS[verdict.state])]
    if verdict.advice:
        parts.append(Text(verdict.advice))
    return Panel(Group(*parts, Text(), table), title=Text(f"{found.run}: {verdict.state}"), expand=False)


def _rows(found: RunStatus, *, is_over: bool) -> list[tuple[str, str]]:
    now = found.progress
    at = now.gauges
    rows = [] if found.ending == "done" else [("ended in" if is_over else "phase", f"{now.phase}, {now.phase_s:.0f} s")]
    if at.num_steps:
        rows += [
            ("step", _step(found)),
            ("version", f"{at.version} in the engines, {at.learner_version} at the learner"),
            ("lag", f"{at.lag} in the last batch, " + ("no bound" if at.max_lag is None else f"at most {at.max_lag}")),
        ]
    rows += [("useful groups" if number == 0 else "", text) for number, text in enumerate(at.learning)]
    if found.tokens_per_s is not None and at.num_tokens and not is_over:
        rows.append(("generating", f"{found.tokens_per_s:.0f} tokens/s"))
    if at.ledger:
        rows.append(("ledger", ", ".join(f"{name} {count}" for name, count in at.ledger.items() if count) or "empty"))
    if at.queues and not is_over:
        rows.append(("queues", ", ".join(f"{name} {count}" for name, count in at.queues.items())))
    if found.placement:
        rows.append(("placement", found.placement))
    rows.append(("last movement", f"{now.quiet_s:.0f} s before this was written, by the {now.last_beat}"))
    waits = () if is_over else now.waits
    rows += [("waiting" if number == 0 else "", str(wait)) for number, wait in enumerate(waits)]
    rows.append(("written", f"{found.age_s():.0f} s ago by process {found.writer.pid}"))
    return rows


def _step(found: RunStatus) -> str:
    at = found.progress.gauges
    text = f"{at.step} of {at.num_steps}"
    if found.steps_per_hour:
        text += f", {found.steps_per_hour:.0f} an hour"
    if found.steps_per_hour and not found.ending:
        text += f", about {60 * (at.num_steps - at.step) / found.steps_per_hour:.0f} min to go"
    return text
