"""What running processes and folders take up, as /proc and the file system tell it. Knows nothing of sandboxes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, nearest first. Orphans of a pid namespace are children of its pid 1."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop(0)
        children: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    children += map(int, (task / "children").read_text().split())
        found += children
        queue += children
    return found


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that were waited for; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def peak_rss_bytes(pid: int) -> int:
    """High-water mark of resident memory; 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def pss_bytes(pid: int) -> int:
    """Proportional set size, where shared pages count by their share; 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def folder_bytes(path: str) -> int:
    """Disk space taken by all below a folder, which may change meanwhile; links are not followed."""
    total, queue = 0, [path]
    while queue:
        with contextlib.suppress(OSError), os.scandir(queue.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
    return total
