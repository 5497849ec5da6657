"""Child processes: started with a log file, watched, restarted, and ended whenever the process that owns them ends.

Independent of what the children do, and of where they run (place.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from asyncio import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import InfraError
from agentrl.supervision.backoff import RestartBudget, backoff_s
from agentrl.supervision.orphan_guard import MARK_VARIABLE
from agentrl.supervision.process_tree import GRACE_S, end_processes, guarded_by

log = logging.getLogger(__name__)

RESTART_AFTER_S = 1.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where one start of a part runs. Example: `Spot(host="10.0.0.3", port=8000).url` is `http://10.0.0.3:8000`."""

    host: str = "127.0.0.1"
    """The address at which the other parts reach it."""
    port: int = 0
    """For the part to listen on; 0 where it asked for none."""
    machine: int = 0
    """Number of the machine, of a part that runs on several."""
    meeting: str = ""
    """HOST:PORT of the first of several machines."""

    @property
    def url(self) -> str:
        """Base URL of a part that listens."""
        return f"http://{self.host}:{self.port}"


Command = Sequence[str] | Callable[[Spot], Sequence[str]]
"""The arguments, or a function that makes them for each start: a restart may be elsewhere, or have to resume."""


def arguments_of(command: Command, spot: Spot) -> list[str]:
    """The arguments of a start at `spot`."""
    return list(command(spot) if callable(command) else command)


class Process(Protocol):
    """One start of a part: its guard, its command and all that they start. See LocalProcess and RayProcess."""

    @property
    def spot(self) -> Spot:
        """Where it runs."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while it runs. Negative: the guard was killed; over 128: a signal ended the command."""
        ...

    @property
    def note(self) -> str:
        """What else is known about its end; empty, or `its node went away`."""
        ...

    async def wait(self) -> int:
        """Exit code; waits for the end."""
        ...

    async def stop(self) -> None:
        """Ask it to end, force it after a grace time, and return when all its processes are gone; even if cancelled."""
        ...

    def end_all(self) -> None:
        """End all its processes now, without waiting for them."""
        ...


class Child:
    """A part of the run as a process: its name, its log, its exit code, its restarts. Made by `child` or by a place.

    Example:
        async with child("engine", command, log_path=logs / "engine.log", may_end=never) as part:
            part.allow_restarts(3)
            await part.watch()  # restarts it when it dies; raises ChildDied after the fourth death
    """

    def __init__(
        self,
        name: str,
        log_path: Path,
        start: Callable[[], Coroutine[Any, Any, Process]],
        *,
        may_end: Callable[[], bool],
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.process: Process
        self._start = start
        self._may_end = may_end
        self._restarts = RestartBudget(0)
        self._started = 0.0
        self.num_starts = 0
        """Starts so far."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Child]:
        """Start it; all its processes are gone when the block is left. Raises InfraError when it cannot be started."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        await self.start()
        try:
            yield self
        finally:
            await self.process.stop()

    async def start(self) -> None:
        """Run the command. Raises InfraError when it cannot be started."""
        self.num_starts += 1
        self._started = time.monotonic()
        try:
            self.process = await self._start()
        except OSError as error:
            raise InfraError(f"the {self.name} process could not be started: {error}") from error

    @property
    def spot(self) -> Spot:
        """Where it runs now; a restart may be elsewhere."""
        return self.process.spot

    def end_all(self) -> None:
        """End every process of this part at once. `watch` then starts it again."""
        self.process.end_all()

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
            await self.process.stop()  # also ends what its guard left because it was killed itself
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
        note = self.process.note
        return f"{what}; {note}" if code and note else what

    def log_tail(self, num_lines: int = 12, max_bytes: int = 16_384) -> str:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, os.path.getsize(self.log_path) - max_bytes))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        return "\n".join("  " + line for line in text.splitlines()[-num_lines:]) or "  (it wrote nothing)"


class LocalProcess:
    """A Process on this machine. Example: `await LocalProcess.start(command, log_path=..., mark=uuid.uuid4().hex)`."""

    def __init__(
        self, process: subprocess.Process, *, mark: str, spot: Spot, on_line: Callable[[str], None] | None
    ) -> None:
        self.spot = spot
        self.pid = process.pid
        """Of the guard, and its session."""
        self._process = process
        self._mark = mark
        self._oom_kills = _oom_kills()
        self._reader = asyncio.create_task(_read_lines(process, on_line), name=f"output of process {process.pid}")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        log_path: Path,
        mark: str,
        env: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        has_own_temporary: bool = False,
        spot: Spot | None = None,
    ) -> LocalProcess:
        """Start `command` under a guard. `mark` is in its environment; see `child` for the rest. Raises OSError."""
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *guarded_by(mark if has_own_temporary else None),
                *command,
                stdin=subprocess.PIPE,
                stdout=log_file if on_line is None else subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **env, MARK_VARIABLE: mark},
                start_new_session=True,
            )
        return cls(process, mark=mark, spot=spot or Spot(), on_line=on_line)

    @property
    def returncode(self) -> int | None:
        """See Process."""
        return self._process.returncode

    @property
    def note(self) -> str:
        """See Process."""
        num_ended = _oom_kills() - self._oom_kills
        return f"while it ran, the kernel ended {num_ended} process(es) because memory ran out" if num_ended else ""

    async def wait(self) -> int:
        """See Process."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the guard alone."""
        self._process.kill()

    async def stop(self) -> None:
        """See Process. Closes the guard's input and waits for its end: a second Ctrl-C leaves no orphan."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ended = asyncio.ensure_future(self._process.wait())
        cancelled = False
        while not ended.done():
            try:
                await asyncio.wait({ended}, timeout=GRACE_S + 5)
            except asyncio.CancelledError:
                cancelled = True
                continue
            if not ended.done():
                self._process.kill()
        self.end_all()
        if cancelled:
            raise asyncio.CancelledError
        await self._reader

    def end_all(self) -> None:
        """See Process."""
        end_processes(self._mark, guard=self.pid, is_over=self._process.returncode is not None)


@asynccontextmanager
async def child(
    name: str,
    command: Command,
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    may_end: Callable[[], bool] = lambda: True,
    has_own_temporary: bool = False,
    spot: Spot | None = None,
) -> AsyncIterator[Child]:
    """Run `command` here for the length of the block; it and all that it started are gone when the block is left.

    Args:
        env: variables added to this process's own.
        on_line: called with each line of standard output, which then does not go to the log.
        may_end: asked after exit code 0; if it returns False, the end counts as a death.
        has_own_temporary: its temporary files (TMPDIR) are removed when it has ended, however it ended.
        spot: passed to a `command` that is a function.

    Raises:
        InfraError: the command could not be started.
    """
    at = spot or Spot()

    async def start() -> Process:
        return await LocalProcess.start(
            arguments_of(command, at),
            log_path=log_path,
            mark=uuid.uuid4().hex,
            env=env or {},
            on_line=on_line,
            has_own_temporary=has_own_temporary,
            spot=at,
        )

    async with Child(name, log_path, start, may_end=may_end).running() as part:
        yield part


async def _read_lines(process: subprocess.Process, on_line: Callable[[str], None] | None) -> None:
    if process.stdout is not None and on_line is not None:
        async for line in process.stdout:
            on_line(line.decode(errors="replace").rstrip("\n"))


def _oom_kills() -> int:
    """Processes that the kernel has ended because memory ran out, in containers too."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
