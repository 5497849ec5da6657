"""`agentrl env list`: what is registered, on a line each."""

from __future__ import annotations

import inspect

from rich.console import Console
from rich.table import Table

from agentrl.env import EnvSpec, specs

PLAIN_WIDTH = 200


def show_environments() -> None:
    """Id, place, and the first line of the class's description."""
    console = Console(highlight=False)
    if not console.is_terminal:  # whoever reads a pipe wants whole lines
        console = Console(highlight=False, width=PLAIN_WIDTH)
    table = Table("id", "class", "what it is", box=None, pad_edge=False)
    for spec in specs():
        table.add_row(spec.id, spec.entry_point, _summary(spec))
    console.print(table)
    console.print("Your own: module:Class or path/to/file.py:Class; `agentrl env new NAME` writes one.")


def _summary(spec: EnvSpec) -> str:
    return (inspect.getdoc(spec.load()) or "").partition("\n")[0]
