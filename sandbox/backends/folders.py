"""Work folders of sessions that have no file system of their own. Their content is hostile."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess

REMOVE_DEADLINE_S = 30.0


def size_bytes(path: str) -> float:
    """Disk space of everything below a folder, which may change meanwhile. An empty file is counted as one page.

    Infinite when it is nested deeper than a path can express, or closed to its own user: a program only does that to
    hide something.
    """
    total, queue = 0.0, [path]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        blocks_bytes = entry.stat(follow_symlinks=False).st_blocks * 512
                        total += max(blocks_bytes, resource.getpagesize())
                        if entry.is_dir(follow_symlinks=False):
                            queue.append(entry.path)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return float("inf")
    return total


def remove(path: str) -> None:
    """Delete a folder and everything below it, at any depth, also what is closed to its owner. Nothing may run in it.

    Uses the system's own tools, because shutil.rmtree fails on folders nested deeper than Python's recursion limit.
    """
    try:
        os.rmdir(path)
    except OSError:
        for command in (["chmod", "-R", "u+rwx", path], ["rm", "-rf", path]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=REMOVE_DEADLINE_S, check=False)
