"""Reads from /proc what a running process and its descendants use. Independent of sandboxes."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable

_CPUCLOCK_SCHED = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that any thread of `pid` forked, or that were orphaned below it. Empty when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, read(f"/proc/{pid}/task/{task}/children").split())
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
    """False for a process that is gone, or that has ended and was not reaped yet."""
    return _stat(pid)[:1] not in ([], ["Z"])


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
    return _kib(read(f"/proc/{pid}/status"), "VmHWM:")


def own_memory_bytes(pid: int) -> int:
    """Resident and swapped memory that no file backs; 0 when the process is gone.

    Includes memory that it still shares with the process it was forked from. Unlike the proportional share (PSS), this
    can be read for processes of other users.
    """
    return _kib(read(f"/proc/{pid}/status"), "RssAnon:", "RssShmem:", "VmSwap:")


def deleted_bytes(pids: Iterable[int]) -> int:
    """Disk space of deleted files that these processes hold open.

    Misses processes that this one may not inspect: of another uid, in a container without CAP_SYS_PTRACE.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(held.st_mode) and held.st_nlink == 0:
                        found[held.st_dev, held.st_ino] = held.st_blocks * 512
    return sum(found.values())


def num_tasks(uid: int) -> int:
    """Processes and threads of a user on the whole machine, as RLIMIT_NPROC counts them."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total
