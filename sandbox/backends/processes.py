"""Reads from /proc what a running process and its descendants use. Independent of sandboxes."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Collection, Iterable

KILL_PAUSE_S = 0.002
_MAX_KILL_ROUNDS = 20
_DEATH_S = 2.0
_CPUCLOCK_SCHED = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that any thread of `pid` forked, or that were orphaned below it. Empty when it is gone."""
    found: list[int] = []
    for thread in threads(pid):
        found += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, nearest first. Orphans of a pid namespace are children of its pid 1."""
    found, queue = [], [pid]
    while queue:
        below = children(queue.pop(0))
        found += [child for child in below if is_alive(child)]
        queue += below
    return found


def is_alive(pid: int) -> bool:
    """False for a process that is gone, or whose last thread has ended and that was not reaped yet.

    A process whose main thread alone has ended looks like a zombie, but its other threads run on.
    """
    state = _stat(pid)[:1]
    return state != [] and (state != ["Z"] or len(threads(pid)) > 1)


class Kills:
    """Kills of what a call left, and when to give up: where new processes keep coming, or one does not die.

    A busy machine takes long to end a process that was killed, so rounds without a new process are not counted.

    Example:
        kills = Kills()
        while strays := descendants(pid):
            if not kills.again(strays):
                break
            time.sleep(KILL_PAUSE_S)
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._rounds = 0
        self._deadline_s = time.monotonic() + _DEATH_S

    def again(self, pids: Collection[int]) -> bool:
        """Send SIGKILL to all of them. False where it is of no use to go on."""
        if not self._seen.issuperset(pids):
            self._rounds += 1
            self._seen.update(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return self._rounds < _MAX_KILL_ROUNDS and time.monotonic() < self._deadline_s


def threads(pid: int) -> list[str]:
    """Ids of the threads of a process, also of one whose main thread has ended; empty when it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the state on. Empty when it is gone."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def read(path: str) -> str:
    """A small file's text, empty when it is gone. Twice as fast as open(), which matters because every call does it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    data = b""
    try:
        while chunk := os.read(fd, 65_536):
            data += chunk
    except OSError:
        return ""
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace")


def _status(pid: int) -> str:
    """/proc/PID/status of a thread that still has memory: that of an ended main thread shows none."""
    status = read(f"/proc/{pid}/status")
    if "RssAnon:" in status:
        return status
    others = (read(f"/proc/{pid}/task/{thread}/status") for thread in threads(pid))
    return next((other for other in others if "RssAnon:" in other), "")


def _kib(status: str, *names: str) -> int:
    """Sum of some lines of /proc/PID/status, in bytes."""
    lines = (line for line in status.splitlines() if line.startswith(names))
    return sum(int(line.split()[1]) for line in lines) * 1024


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its reaped children; 0 when it is gone.

    Its own time is exact to the nanosecond, by the clock that the kernel keeps for each process (see
    clock_getcpuclockid(3)).
    """
    try:
        own = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0
    return own + sum(map(int, _stat(pid)[13:15])) / _TICKS_PER_S


def peak_rss_bytes(pid: int) -> int:
    """High-water mark of resident memory; 0 when the process is gone."""
    return _kib(_status(pid), "VmHWM:")


def own_memory_bytes(pid: int, *, with_shared: bool) -> int:
    """Resident and swapped memory that no file backs, with its page tables; 0 when the process is gone.

    `with_shared`: also resident memory that it may share with others, such as a map of a file in memory.

    Includes memory that it still shares with the process it was forked from. Unlike the proportional share (PSS), this
    can be read for processes of other users.
    """
    return _kib(_status(pid), "RssAnon:", "VmSwap:", "VmPTE:", *(("RssShmem:",) if with_shared else ()))


def deleted_bytes(pids: Iterable[int], folder: str) -> int:
    """Disk space of deleted files that these processes hold open, or mapped from below `folder`, by any thread.

    Misses processes that this one may not inspect: of another uid, in a container without CAP_SYS_PTRACE.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for thread in threads(pid):  # a thread may have descriptors of its own
            found |= _deleted_and_open(f"/proc/{pid}/task/{thread}")
            for key, num_bytes in _deleted_and_mapped(read(f"/proc/{pid}/task/{thread}/maps"), folder).items():
                found.setdefault(key, num_bytes)
    return sum(found.values())


def _deleted_and_open(folder: str) -> dict[tuple[int, int], int]:
    """(device, inode) -> bytes of the deleted regular files among the descriptors of a thread."""
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(OSError):
                held = os.stat(f"{folder}/fd/{fd}")
                if stat.S_ISREG(held.st_mode) and held.st_nlink == 0:
                    found[held.st_dev, held.st_ino] = held.st_blocks * 512
    return found


def _deleted_and_mapped(maps: str, folder: str) -> dict[tuple[int, int], int]:
    """(device, inode) -> mapped bytes of the deleted files below a folder, from /proc/PID/maps.

    Others may be libraries that were upgraded meanwhile.

    >>> _deleted_and_mapped("1000-3000 rw-s 0 08:01 7 /home/a (deleted)", "/home")
    {(2049, 7): 8192}
    """
    found: dict[tuple[int, int], int] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(" (deleted)") and fields[5].startswith(f"{folder}/"):
            begin, _, end = fields[0].partition("-")
            major, _, minor = fields[3].partition(":")
            key = os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
            found[key] = found.get(key, 0) + int(end, 16) - int(begin, 16)
    return found


def num_tasks(uid: int) -> int:
    """Processes and threads of a user on the whole machine, as RLIMIT_NPROC counts them."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    total += len(threads(int(entry.name)))
    return total
