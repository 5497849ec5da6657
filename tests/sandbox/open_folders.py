"""Starts the service as some user in a place where Python can be read by all: `open_folders.py UID FLAGS...`.

Python may live in a home that is closed to others; a mount namespace shows it below open folders of the same names.
UID 0 stays root. Needs root. Knows nothing of what the flags mean.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandbox.backends import linux


def main(uid: int, flags: list[str]) -> None:
    """Open the folders, change to user `uid`, and run `python -m sandbox`."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in (sys.base_prefix, sys.prefix, os.environ["PYTHONPATH"])}
    for path in kept:
        closed = [folder for folder in reversed(Path(path).parents) if not folder.stat().st_mode & 1]
        if closed:
            linux.mount("open", str(closed[0]), "tmpfs", 0, "mode=755")
    for path, fd in kept.items():
        if not os.path.isdir(path):
            os.makedirs(path)
            linux.mount(f"/proc/self/fd/{fd}", path, None, linux.MS_BIND | linux.MS_REC)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.chdir("/")
    os.execv(sys.executable, [sys.executable, "-m", "sandbox", *flags])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
