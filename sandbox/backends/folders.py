"""Work folders of sessions that have no file system of their own. Whatever lies in them is hostile."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess

REMOVE_DEADLINE_S = 30.0


def size_bytes(path: str) -> float:
    """Disk space taken by all below a folder, which may change meanwhile; an empty file takes a page, as a guess.

    Infinite when it is nested deeper than a path can say, or closed to its own user: nobody does that but to hide
    something.
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
    """Delete a folder and all below it, however deep and also what was closed to its owner. Nothing may run in it.

    By the system's own tools: shutil.rmtree fails on what is nested deeper than Python recurses.
    """
    try:
        os.rmdir(path)
    except OSError:
        for command in (["chmod", "-R", "u+rwx", path], ["rm", "-rf", path]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=REMOVE_DEADLINE_S, check=False)
