"""`agentrl env list`: what is registered, on a line each."""

from __future__ import annotations

import inspect

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.env import EnvSpec, specs


def show_environments() -> None:
    """Id, place, and the first line of the class's description; whole lines where no terminal reads them."""
    console = Console(highlight=False)
    table = Table("id", "class", "what it is", box=None, pad_edge=False)
    for spec in specs():
        cells = (spec.id, spec.entry_point, _summary(spec))
        if console.is_terminal:
            table.add_row(*map(Text, cells))
        else:
            console.print(Text("  ".join(cells)), soft_wrap=True)
    if console.is_terminal:
        console.print(table)
    console.print("Your own: module:Class or path/to/file.py:Class; `agentrl env new NAME` writes one.", soft_wrap=True)


def _summary(spec: EnvSpec) -> str:
    return (inspect.getdoc(spec.load()) or "").partition("\n")[0]
