"""Child processes with an owner: started with a log file, watched, and gone when their owner is gone.

Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl import guard
from agentrl.errors import InfraError

GRACE_S = 8.0


class ChildDied(InfraError):
    """A part of the run ended on its own."""


class Child:
    """A running part: its name, its log, and whether it still lives."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Exit code, once it ended."""
        return await self._process.wait()

    async def watch(self) -> None:
        """Return when it ended with code 0; raise ChildDied, with the end of its log, otherwise."""
        code = await self._process.wait()
        if code != 0:
            raise ChildDied(
                f"the {self.name} process ended with exit code {code}. The end of {self.log_path}:\n{self.log_tail()}"
            )

    def log_tail(self, num_lines: int = 12, max_bytes: int = 16_384) -> str:
        """The last lines it wrote."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, os.path.getsize(self.log_path) - max_bytes))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        return "\n".join("  " + line for line in text.splitlines()[-num_lines:]) or "  (it wrote nothing)"


@asynccontextmanager
async def child(
    name: str,
    command: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> AsyncIterator[Child]:
    """Run `command` for the length of the block; its whole process group is gone when the block is left.

    Args:
        env: variables added to this process's own.
        on_line: called with each line of standard output, which then does not go to the log.

    Raises:
        InfraError: the command could not be started.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(GRACE_S), *command]
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *guarded,
            stdin=asyncio.subprocess.PIPE,
            stdout=log if on_line is None else asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    reader = asyncio.create_task(_read_lines(process, on_line), name=f"output of {name}")
    try:
        yield Child(name, process, log_path)
    finally:
        await _stop(process)
        await reader


async def _read_lines(process: asyncio.subprocess.Process, on_line: Callable[[str], None] | None) -> None:
    if process.stdout is not None and on_line is not None:
        async for line in process.stdout:
            on_line(line.decode(errors="replace").rstrip("\n"))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the guard's input and wait for its end, also when cancelled again: a second Ctrl-C leaves no orphan."""
    assert process.stdin is not None
    process.stdin.close()
    ended = asyncio.ensure_future(process.wait())
    cancelled = False
    while not ended.done():
        try:
            await asyncio.wait({ended}, timeout=GRACE_S + 5)
        except asyncio.CancelledError:
            cancelled = True
            continue
        if not ended.done():
            process.kill()
    if cancelled:
        raise asyncio.CancelledError
