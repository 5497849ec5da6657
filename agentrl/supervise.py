"""Child processes with an owner: started with a log file, watched, and gone when their owner is gone.

Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl import guard
from agentrl.errors import InfraError

log = logging.getLogger(__name__)

GRACE_S = 8.0
RESTART_AFTER_S = 1.0
MARK_VARIABLE = "AGENTRL_PART"  # in the environment of a part's processes: by it they are found again


class ChildDied(InfraError):
    """A part of the run ended on its own."""


class Child:
    """A running part: its name, its log, and whether it still lives."""

    def __init__(self, name: str, log_path: Path, start: Callable[[str], Coroutine[Any, Any, Process]]) -> None:
        self.name = name
        self.log_path = log_path
        self.process: Process
        self._start = start
        self._mark = uuid.uuid4().hex
        self._restarts_left = 0
        self.num_starts = 0
        """How often it was started."""

    async def start(self) -> None:
        """Run the command. Raises InfraError when it cannot be."""
        self.num_starts += 1
        self.process = await self._start(self._mark)

    def end_left_over(self) -> None:
        """End what the guard could not, having been killed itself: whatever carries this part's mark."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK_VARIABLE}={self._mark}".encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def allow_restarts(self, number: int) -> None:
        """From now on `watch` starts it again, up to `number` times, when it dies."""
        self._restarts_left = number

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Exit code, once it ended."""
        return await self.process.wait()

    async def watch(self) -> None:
        """Return when it ended with code 0; otherwise start it again, or raise ChildDied with the end of its log."""
        while code := await self.process.wait():
            self.end_left_over()
            what = f"the {self.name} process ended with exit code {code}"
            if not self._restarts_left:
                raise ChildDied(f"{what}. The end of {self.log_path}:\n{self.log_tail()}")
            self._restarts_left -= 1
            log.warning("%s; it is started again (%d more times at most)", what, self._restarts_left)
            await asyncio.sleep(RESTART_AFTER_S)
            await self.start()

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

    async def start(mark: str) -> Process:
        with log_path.open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                *guarded,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file if on_line is None else asyncio.subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **(env or {}), MARK_VARIABLE: mark},
                start_new_session=True,
            )

    part = Child(name, log_path, start)
    await part.start()
    reader = asyncio.create_task(_read_lines(part.process, on_line), name=f"output of {name}")
    try:
        yield part
    finally:
        await _stop(part.process)
        part.end_left_over()
        await reader


async def _read_lines(process: Process, on_line: Callable[[str], None] | None) -> None:
    if process.stdout is not None and on_line is not None:
        async for line in process.stdout:
            on_line(line.decode(errors="replace").rstrip("\n"))


async def _stop(process: Process) -> None:
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
