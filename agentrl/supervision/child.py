"""Child processes: started with a log file, watched, restarted, and ended whenever the process that owns them ends.

Independent of what the children do.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.errors import InfraError
from agentrl.supervision import orphan_guard
from agentrl.supervision.backoff import RestartBudget, backoff_s

log = logging.getLogger(__name__)

GRACE_S = 8.0
RESTART_AFTER_S = 1.0
MARK_VARIABLE = "AGENTRL_PART"  # set in the environment of all processes of a part, to find those left over
MAX_TEMPORARY = 60  # characters: the path of a socket in such a folder must not exceed 107


class ChildDied(InfraError):
    """A part of the run ended on its own. Example: the engine, after its last restart; the message has its log's
    end."""


def module_command(module: str) -> list[str]:
    """The command that runs a module with this Python: `[python, "-m", "sandbox"]`.

    `-m` alone searches the working directory first, where a user's folder named `sandbox` would run instead. The
    command does so only where this process does: the console script does not.
    """
    searches_cwd = not {"", os.getcwd()}.isdisjoint(sys.path)
    return [sys.executable, *([] if searches_cwd else ["-P"]), "-m", module]


def never() -> bool:
    """For `may_end` of a service: it must not end on its own."""
    return False


class Child:
    """A part of the run as a process: its name, its log, its exit code, its restarts. Made by `child`.

    Example:
        async with child("engine", command, log_path=logs / "engine.log", may_end=never) as part:
            part.allow_restarts(3)
            await part.watch()  # restarts it when it dies; raises ChildDied after the fourth death
    """

    def __init__(
        self,
        name: str,
        log_path: Path,
        start: Callable[[str], Coroutine[Any, Any, Process]],
        *,
        may_end: Callable[[], bool],
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.process: Process
        self._start = start
        self._may_end = may_end
        self._mark = uuid.uuid4().hex
        self._restarts = RestartBudget(0)
        self._started = 0.0
        self._oom_kills = 0
        self.num_starts = 0
        """Starts so far."""

    async def start(self) -> None:
        """Run the command. Raises InfraError when it cannot be started."""
        self.num_starts += 1
        self._started, self._oom_kills = time.monotonic(), _oom_kills()
        try:
            self.process = await self._start(self._mark)
        except OSError as error:
            raise InfraError(f"the {self.name} process could not be started: {error}") from error

    def end_all(self) -> None:
        """End every process of this part at once. `watch` then starts it again. Also ends those, and removes the
        temporary files, that the orphan guard left because it was killed itself."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK_VARIABLE}={self._mark}".encode() in path.read_bytes().split(b"\0"):
                    orphan_guard.kill_unless_tracker(int(path.parent.name))
        shutil.rmtree(temporary_folder(self._mark), ignore_errors=True)

    def allow_restarts(self, number: int) -> None:
        """From now on `watch` restarts the part when it dies: `number` times in a row, see RestartBudget."""
        self._restarts = RestartBudget(number)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Exit code; waits for the end."""
        return await self.process.wait()

    async def watch(self) -> None:
        """Return when the part ended with code 0 and `may_end` allowed it.

        Otherwise restart it, after a pause that doubles each time. Raises ChildDied with the end of its log when no
        restart is left, InfraError when it cannot be started.
        """
        while (code := await self.process.wait()) or not self._may_end():
            self.end_all()
            what = self._how_it_ended(code)
            if (used := self._restarts.take(time.monotonic() - self._started)) is None:
                again = f" (started {self.num_starts} times)" if self.num_starts > 1 else ""
                raise ChildDied(f"{what}{again}. The end of {self.log_path}:\n{self.log_tail()}")
            pause_s = backoff_s(used, base_s=RESTART_AFTER_S)
            log.warning("%s; it is started again in %.1f s (%d more times at most)", what, pause_s, self._restarts.left)
            await asyncio.sleep(pause_s)
            await self.start()

    def _how_it_ended(self, code: int) -> str:
        what = f"the {self.name} process ended with exit code {code}"
        with suppress(ValueError):  # negative: the guard itself was killed; over 128: the guard reports the signal
            what += f" ({signal.Signals(-code if code < 0 else code - 128).name})"
        if code and (num_ended := _oom_kills() - self._oom_kills):
            what += f"; while it ran, the kernel ended {num_ended} process(es) because memory ran out"
        return what

    def log_tail(self, num_lines: int = 12, max_bytes: int = 16_384) -> str:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, os.path.getsize(self.log_path) - max_bytes))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        return "\n".join("  " + line for line in text.splitlines()[-num_lines:]) or "  (it wrote nothing)"


def temporary_folder(mark: str) -> Path:
    """The folder for the temporary files of a part, in /tmp where sockets would have too long a path elsewhere."""
    parent = Path(tempfile.gettempdir())
    return (parent if len(str(parent)) <= MAX_TEMPORARY else Path("/tmp")) / f"agentrl-{mark[:12]}"


def _made_temporary(mark: str) -> Path:
    """That folder, with a link to the folder in which torch keeps what it compiles: compiling again would take half a
    minute of each start. TORCHINDUCTOR_CACHE_DIR does not cover torch's precompiled headers."""
    try:
        name = f"torchinductor_{getpass.getuser()}"
    except (KeyError, ImportError, OSError):  # a user without a name, as in some containers; torch does the same
        name = f"torchinductor_uid_{os.getuid()}"
    folder, cache = temporary_folder(mark), Path(tempfile.gettempdir(), name)
    folder.mkdir(mode=0o700, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        (folder / name).symlink_to(cache)
    return folder


def guarded_by(mark: str | None = None) -> list[str]:
    """What is written before a command to run it under the orphan guard. `mark`: with temporary files of its own."""
    folder = "" if mark is None else str(_made_temporary(mark))
    return [sys.executable, "-I", "-S", orphan_guard.__file__, str(GRACE_S), folder]


def in_foreground(command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run one part with this process's own output, and temporary files of its own. Returns its exit code.

    Ends it, and raises KeyboardInterrupt, on Ctrl-C, SIGTERM (a container stops) and SIGHUP (a terminal closes).
    """
    process = subprocess.Popen(
        [*guarded_by(uuid.uuid4().hex), *command],
        stdin=subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
    )
    assert process.stdin is not None
    end, stopped = process.stdin.close, False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        end()

    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    for number in (signal.SIGINT, signal.SIGTERM, *(() if is_kept else (signal.SIGHUP,))):
        signal.signal(number, stop)
    code = process.wait()
    if stopped:
        raise KeyboardInterrupt
    return code


@asynccontextmanager
async def child(
    name: str,
    command: Sequence[str] | Callable[[], Sequence[str]],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    may_end: Callable[[], bool] = lambda: True,
    has_own_temporary: bool = False,
) -> AsyncIterator[Child]:
    """Run `command` for the length of the block; its whole process group is gone when the block is left.

    Args:
        command: the arguments, or a function that makes them for each start: a restart may have to resume.
        env: variables added to this process's own.
        on_line: called with each line of standard output, which then does not go to the log.
        may_end: asked after exit code 0; if it returns False, the end counts as a death.
        has_own_temporary: its temporary files (TMPDIR) are removed when it has ended, however it ended.

    Raises:
        InfraError: the command could not be started.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    readers: list[asyncio.Task[None]] = []

    async def start(mark: str) -> Process:
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *guarded_by(mark if has_own_temporary else None),
                *(command() if callable(command) else command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file if on_line is None else asyncio.subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **(env or {}), MARK_VARIABLE: mark},
                start_new_session=True,
            )
        readers.append(asyncio.create_task(_read_lines(process, on_line), name=f"output of {name}"))
        return process

    part = Child(name, log_path, start, may_end=may_end)
    await part.start()
    try:
        yield part
    finally:
        await _stop(part.process)
        part.end_all()
        await asyncio.gather(*readers)


async def _read_lines(process: Process, on_line: Callable[[str], None] | None) -> None:
    if process.stdout is not None and on_line is not None:
        async for line in process.stdout:
            on_line(line.decode(errors="replace").rstrip("\n"))


async def _stop(process: Process) -> None:
    """Close the guard's input and wait for its end, even if cancelled meanwhile: a second Ctrl-C leaves no orphan."""
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


def _oom_kills() -> int:
    """Processes that the kernel has ended because memory ran out, in containers too."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
