"""Runs one command on the machine of a Ray actor: under the guard of local parts, with its log and its end to ask for.

A plain class without Ray, which ray_place.py makes an actor of. It holds the guard's input, so the part ends with the
actor: when the run drops it, when its worker is killed, when its node goes away. Nothing of the run's state is here.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from agentrl.supervision.orphan_guard import MARK_VARIABLE
from agentrl.supervision.process_tree import birth, end_processes, guarded_by

MAX_NEWS_BYTES = 256 * 1024
POLL_S = 0.1
GUARD_KILLED = -9
THREADS = "OMP_NUM_THREADS"
FREE_KEEPING_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)


class CannotStart(Exception):
    """The command cannot be started on this machine."""


class PartHost:
    """One start of a part on this machine. Its methods may run at the same time, in threads.

    Example:
        host = PartHost()
        host.start([sys.executable, "-c", "print('on')"], {}, python=sys.executable, cwd="/", has_own_temporary=False)
        host.news(0, 0, within_s=5.0)  # (b"on\\n", b"", None), and (b"", b"", 0) once it has ended
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._birth: int | None = None
        self._code: int | None = None
        self._ended = threading.Event()
        # They have no names and end with this process.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def address(self) -> str:
        """The address of this node, in a Ray actor."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_port(self, host: str, port: int) -> int:
        """`port`, or any free one for 0. Raises CannotStart when it is taken."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror}") from None
            return int(sock.getsockname()[1])

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        python: str,
        cwd: str,
        has_own_temporary: bool,
        has_output: bool = False,
    ) -> int:
        """Start `command` with `env` added to this process's environment. Returns the number of its guard.

        Args:
            python: the caller's interpreter; as the first word of the command it means this machine's.
            cwd: the folder to run in.
            has_output: standard output is kept apart from the log.

        Raises CannotStart, e.g. for a folder that is not on this machine.
        """
        if not Path(cwd).is_dir():
            raise CannotStart(
                f"{socket.gethostname()} has no folder {cwd}: start the run in a folder that all nodes see under the "
                "same name"
            )
        words = [sys.executable if command[0] == python else command[0], *command[1:]]
        report, reports = os.pipe()
        guard = guarded_by(self._mark if has_own_temporary else None, report=reports)
        try:
            self._guard = subprocess.Popen(
                [*guard, *words],
                stdin=subprocess.PIPE,
                stdout=self._output if has_output else self._log,
                stderr=self._log,
                env={**_environment(), **env, MARK_VARIABLE: self._mark},
                cwd=cwd,
                pass_fds=[reports],
            )
        finally:
            os.close(reports)
        self._guard.wait()  # it goes on elsewhere: Ray kills a worker's children with it
        lines = os.fdopen(report)
        self._pid = int(lines.readline() or 0)
        self._birth = birth(self._pid)
        threading.Thread(target=self._read_code, args=(lines,), name="end of the part", daemon=True).start()
        return self._pid

    def _read_code(self, lines: IO[str]) -> None:
        with lines:
            line = lines.readline()
        self._code = int(line) if line else GUARD_KILLED
        self._ended.set()

    def news(self, log_from: int, output_from: int, *, within_s: float) -> tuple[bytes, bytes, int | None]:
        """(log, output, exit code) after the given bytes of each; waits until there is any, at most `within_s`.

        The exit code is None as long as it runs, or there is more to read. What was read before is forgotten, so that
        this machine holds no more than is on its way.
        """
        _forget(self._log, log_from)
        _forget(self._output, output_from)
        deadline = time.monotonic() + within_s
        while True:
            has_ended = self._ended.is_set()  # before reading: what it wrote last is read first
            log, output = _read(self._log, log_from), _read(self._output, output_from)
            if log or output:
                return log, output, None
            if has_ended or time.monotonic() >= deadline:
                return b"", b"", self._code if has_ended else None
            self._ended.wait(POLL_S)

    def stop(self) -> None:
        """Ask it to end, and force it after a grace time."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def end_all(self) -> None:
        """End all its processes now. A guard that reported an exit code has done so."""
        if self._pid and self._code in (None, GUARD_KILLED):
            another = birth(self._pid) not in (None, self._birth)  # has the number of the guard, which has ended
            end_processes(self._mark, guard=self._pid, is_over=another)


def _read(file: IO[bytes], offset: int) -> bytes:
    return os.pread(file.fileno(), MAX_NEWS_BYTES, offset)


def _forget(file: IO[bytes], size: int) -> None:
    """Free the disk under the first `size` bytes; offsets stay. Where the file system cannot, they stay too."""
    if size:
        ctypes.CDLL(None).fallocate(file.fileno(), FREE_KEEPING_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(size))


def _environment() -> dict[str, str]:
    """That of this process without Ray's number of threads, so that parts have the number that they have elsewhere."""
    started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    is_rays = not any(entry.startswith(f"{THREADS}=".encode()) for entry in started_with)
    return {name: value for name, value in os.environ.items() if name != THREADS or not is_rays}
