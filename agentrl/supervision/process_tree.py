"""The processes of one part on this machine: under a guard, with temporary files of their own, and ended as a whole.

Independent of restarts and of logs (child.py).
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.supervision import orphan_guard
from agentrl.supervision.orphan_guard import MARK_VARIABLE

GRACE_S = 8.0
MAX_TEMPORARY = 60  # characters: the path of a socket in such a folder must not exceed 107


def guarded_by(mark: str | None = None, *, report: int | None = None) -> list[str]:
    """What is written before a command to run it under the orphan guard.

    Args:
        mark: with temporary files of its own.
        report: a descriptor that the guard inherits. It leaves the process that starts it, and writes two lines there:
            its number, and at the end the exit code.
    """
    folder = "" if mark is None else str(_made_temporary(mark))
    guard = [sys.executable, "-I", "-S", orphan_guard.__file__]
    return [*guard, str(GRACE_S), folder, "" if report is None else str(report)]


def end_processes(mark: str, *, guard: int, is_over: bool) -> None:
    """End what a guard that was killed has left: its session, processes elsewhere with the mark, temporary files.

    Session and mark are both needed. vLLM writes the names of its processes over the memory that holds their
    environment, and a process may begin a session of its own.
    """
    is_reused = is_over and Path(f"/proc/{guard}").exists()  # no number of a session that has processes is
    seen: set[int] = set()
    while True:
        found = {
            pid
            for pid, _, session in orphan_guard.processes()
            if (session == guard and not is_reused) or _has_mark(pid, mark)
        }
        if found <= seen:
            break
        for pid in found - seen:
            orphan_guard.kill_unless_tracker(pid)
        seen |= found  # and look again: one of them may have started another
    shutil.rmtree(temporary_folder(mark), ignore_errors=True)


def birth(pid: int) -> int | None:
    """When the process began, in clock ticks since the machine started; None where there is none of that number."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return None


def _has_mark(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


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


def in_foreground(command: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run one part with this process's own output, and temporary files of its own. Returns its exit code.

    Ends it, and raises KeyboardInterrupt, on Ctrl-C, SIGTERM (a container stops) and SIGHUP (a terminal closes).
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*guarded_by(mark), *command],
        stdin=subprocess.PIPE,
        env={**os.environ, **env, MARK_VARIABLE: mark},
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
    end_processes(mark, guard=process.pid, is_over=True)
    if stopped:
        raise KeyboardInterrupt
    return code
