"""Counts what the kernel holds for some processes besides their pages, from what /proc tells. Independent of sandboxes.

The memory is an upper bound: /proc tells how many sockets and pipes there are, and not how full they are. It holds only
where the filter of a session refuses what /proc does not show: see `is_charged` in seccomp.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sandbox.backends import processes

MAX_RECORDS = 10_000
"""Record locks, and watches of epoll sets, of a session. No control group charges locks: these are about 2 MB."""
WATCH_INTERVAL_S = 0.05
_PIPE_BYTES = 65_536 + 1024
_EPOLL_BYTES, _RECORD_BYTES = 4096, 256
_RECORDS_AS_TEXT_BYTES = 2 * 1024**2  # an open list of all locks or watches of a file, which the kernel keeps as text
_MAP_BYTES, _MAP_OF_ONE_ANCESTOR_BYTES = 256, 64
_INODE_BYTES = 1280  # of a file in memory, with its name
_ENDED: tuple[list[str], ...] = ([], ["Z"], ["X"])


@dataclass(slots=True)
class Held:
    """What the kernel holds for some processes.

    >>> held([]).num_bytes
    0
    """

    num_bytes: int = 0  # the most that their sockets, pipes and epoll sets can hold
    num_records: int = 0  # record locks, and watches of epoll sets


def held(pids: Iterable[int]) -> Held:
    """Sockets and pipes are counted once, however many of the processes share them. Ends early over `MAX_RECORDS`."""
    total, shared, hidden = Held(), dict[str, int](), set[int]()
    for pid in pids:
        folder = live_thread(pid)
        try:
            numbers = os.listdir(f"{folder}/fd")
        except PermissionError:  # of another uid, in a container without CAP_SYS_PTRACE
            hidden.add(pid)
            with contextlib.suppress(OSError):
                # the number of descriptors, since Linux 6.2
                total.num_bytes += os.stat(f"{folder}/fd").st_size * _socket_bytes()
            continue
        except OSError:
            continue
        for number in numbers:
            with contextlib.suppress(OSError):
                _add(total, shared, folder, number, os.readlink(f"{folder}/fd/{number}"))
            if total.num_records > MAX_RECORDS:
                return total
    total.num_bytes += sum(shared.values())
    if hidden:
        total.num_records += _num_locks(hidden)
    return total


def _add(total: Held, shared: dict[str, int], folder: str, number: str, link: str) -> None:
    """Add one descriptor of the process in `folder`, which shows as `link`."""
    if link.startswith("socket:"):
        shared[link] = _socket_bytes()
    elif link.startswith("pipe:"):
        shared[link] = _PIPE_BYTES
    elif link == "anon_inode:[eventpoll]":
        num_watches = processes.read(f"{folder}/fdinfo/{number}").count("\ntfd:")
        total.num_records += num_watches
        total.num_bytes += _EPOLL_BYTES + num_watches * _RECORD_BYTES
    elif link.startswith("/"):
        total.num_records += processes.read(f"{folder}/fdinfo/{number}").count("\nlock:")
        if "/fdinfo/" in link:
            total.num_bytes += _RECORDS_AS_TEXT_BYTES


def _num_locks(pids: Collection[int]) -> int:
    """Record locks of these processes, by the list of the whole machine."""
    names = {str(pid) for pid in pids}
    lines = (line.replace("-> ", "").split() for line in processes.read("/proc/locks").splitlines())
    return sum(fields[4] in names for fields in lines if len(fields) > 4)


@functools.cache
def _socket_bytes() -> int:
    """The most that one end of a socket pair holds: a full buffer, and the last message, of up to half a buffer."""
    default = processes.read("/proc/sys/net/core/wmem_default")
    return (int(default) if default else 212_992) * 3 // 2 + 4096


def live_thread(pid: int) -> str:
    """The folder in /proc of any thread that has not ended. The filter makes all threads share their descriptors."""
    for thread in processes.threads(pid):
        folder = f"/proc/{pid}/task/{thread}"
        if processes.read(f"{folder}/stat").rpartition(")")[2].split()[:1] not in _ENDED:
            return folder
    return f"/proc/{pid}"


def num_maps(pid: int) -> int:
    """Areas of a process's address space; 0 when it is gone or may not be inspected."""
    return processes.read(f"{live_thread(pid)}/maps").count("\n")


def maps_bytes(pids: Collection[int], *, num_inherited: int) -> int:
    """What the kernel keeps to describe the address spaces, over `num_inherited` areas in each.

    An area that was written to is linked to the same area of every process that it was forked through.
    """
    each_bytes = _MAP_BYTES + _MAP_OF_ONE_ANCESTOR_BYTES * len(pids)
    return each_bytes * sum(max(num_maps(pid) - num_inherited, 0) for pid in pids)


def files_bytes(folders: Iterable[str]) -> int:
    """Memory of the file systems in memory that are mounted at these folders. 0 for those that are gone."""
    total = 0
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found = os.statvfs(folder)
            total += (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * _INODE_BYTES
    return total
