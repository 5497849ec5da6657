"""Work folders of sessions that have no file system of their own. Their content is hostile."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess

REMOVE_DEADLINE_S = 30.0
MAX_ENTRIES = 10_000
"""Files and folders in a work folder, as many as a session with a file system of its own may have."""
MAX_DEPTH = 64
"""Levels of folders: each holds a descriptor of the service during a walk."""
_HIDDEN = (errno.EACCES, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)  # closed to its user, or exchanged
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size_bytes(path: str) -> float:
    """Disk space of everything below a folder, which may change meanwhile. An empty file is counted as one page.

    Folders are opened one below the other and never through a symlink, so that no exchange of a folder during the walk
    leads out of it. Infinite when there are more than `MAX_ENTRIES` or more levels than `MAX_DEPTH`, or when a folder
    is closed to its own user or exchanged meanwhile: a program only does that to hide something.
    """
    walk = _Walk()
    try:
        walk.enter(os.open(path, _OPEN_FOLDER), depth=0)
    except OSError:
        return 0.0 if not os.path.lexists(path) else float("inf")
    return walk.num_bytes


class _Walk:
    """A walk that ends early with an infinite size."""

    def __init__(self) -> None:
        self.num_bytes, self._num_entries = 0.0, 0

    def enter(self, folder: int, *, depth: int) -> None:
        """Add up what lies below the descriptor `folder`, and close it."""
        below = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    below += self._add(entry)
                    if self._num_entries > MAX_ENTRIES:
                        self.num_bytes = float("inf")
                        return
            if below and depth == MAX_DEPTH:
                self.num_bytes = float("inf")
                return
            for name in below:
                if self.num_bytes < float("inf"):
                    self._enter_below(folder, name, depth + 1)
        finally:
            os.close(folder)

    def _add(self, entry: os.DirEntry[str]) -> list[str]:
        """Count an entry. Its name, when it is a folder."""
        self._num_entries += 1
        with contextlib.suppress(FileNotFoundError):
            blocks_bytes = entry.stat(follow_symlinks=False).st_blocks * 512
            self.num_bytes += max(blocks_bytes, resource.getpagesize())
            if entry.is_dir(follow_symlinks=False):
                return [entry.name]
        return []

    def _enter_below(self, folder: int, name: str, depth: int) -> None:
        try:
            fd = os.open(name, _OPEN_FOLDER, dir_fd=folder)
        except FileNotFoundError:
            return  # deleted, or renamed to a place where the next walk finds it
        except OSError as error:
            if error.errno in _HIDDEN:
                self.num_bytes = float("inf")
        else:
            self.enter(fd, depth=depth)


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
