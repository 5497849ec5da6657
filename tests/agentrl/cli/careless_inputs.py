"""Runs a careless input as somebody would type it, in this process, and keeps what it says.

`python -m tests.agentrl.cli.careless_inputs` prints the table of all of them as Markdown.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[3]
COLUMNS = 120
USAGE = ("Usage:", "Try '", "[[KEY")
LINES = 24
"""One screen."""


Around = Callable[[Path], AbstractContextManager[Mapping[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Careless:
    """An input, and what it must say.

    Example:
        Careless(what="a key of TRL", typed="agentrl train my.yaml", says=("learner.lr",))
    """

    what: str
    typed: str
    says: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Of the current folder, which also has `configs`."""
    code: int = 2
    around: Around | None = None
    """Prepares the folder; yields what replaces {names} in `typed` and in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command wrote, and its exit code. Example: `Said(code=2, text="...")`."""

    code: int
    text: str


def run_careless(case: Careless, folder: Path) -> Said:
    """Execute the command in `folder`."""
    (folder / "configs").symlink_to(ROOT / "configs")
    with contextlib.chdir(folder), (case.around or _nothing)(folder) as names:
        for name, content in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else _filled(content, names).encode())
        arguments = shlex.split(_filled(case.typed, names))
        environ = {"COLUMNS": str(COLUMNS), "HF_HUB_OFFLINE": "1"}
        while "=" in arguments[0]:
            name, _, value = arguments.pop(0).partition("=")
            environ[name] = value
        return executed(arguments, environ)


def executed(arguments: Sequence[str], environ: Mapping[str, str]) -> Said:
    """The console script with these arguments. A command that replaces its process is executed in this one."""
    from agentrl.cli.main import main

    def exec_module(_: str, command: Sequence[str]) -> None:
        module = command[command.index("-m") + 1]
        sys.argv = [module, *command[command.index(module) + 1 :]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        raise SystemExit(0)

    written = io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with (
        mock.patch.object(sys, "argv", list(arguments)),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(os, "execv", exec_module),
        mock.patch.dict(os.environ, environ),
        redirect_stdout(written),
        redirect_stderr(written),
        _without_log_handlers(),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Said(code=code if isinstance(code, int) else int(code is not None), text=written.getvalue())


@contextmanager
def _without_log_handlers() -> Iterator[None]:
    """The command's own logging, to its own standard error."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)


def _nothing(_: Path) -> AbstractContextManager[Mapping[str, str]]:
    return nullcontext({})


def _filled(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return text


def flat(text: str) -> str:
    """The words of a screen on one line, without the frame of a panel."""
    lines = (line.strip("│╭╮╰╯─ ") for line in text.splitlines())
    kept = [line for line in lines if line and "--debug shows" not in line and not line.startswith(USAGE)]
    return " ".join(kept)


def markdown(cases: Sequence[Careless]) -> str:
    """The table: what was done, what was typed, the exit code, what is said."""
    rows = ["| input | typed | exit | says |", "|---|---|---|---|"]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            said = run_careless(case, Path(folder))
            text = flat(said.text.replace(folder + "/", "").replace(str(ROOT) + "/", "")).replace("|", "\\|")
        rows.append(f"| {case.what} | `{case.typed}` | {said.code} | {text} |")
    return "\n".join(rows)


if __name__ == "__main__":
    from tests.agentrl.cli.careless_table import CASES

    print(markdown(CASES))  # noqa: T201
