"""The `landlock` backend: for machines where no namespace can be made, such as inside a container.

Landlock blocks files, signals and TCP, and a system call filter blocks the rest. As root, every session has a uid of
its own. Independent of executions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandbox.backends import isolate, linux, seccomp
from sandbox.backends.base import BackendError, BackendSettings, Child
from sandbox.backends.forkserver import ForkServer

_MIN_ABI = 3  # from this version on, truncation is refused too
_MIN_ABI_SAME_UID = 6  # from this version on, signals are refused too


class LandlockBackend:
    """See base.Backend."""

    name = "landlock"

    def __init__(self, settings: BackendSettings) -> None:
        self.isolation = ""
        self.degraded: list[str] = []
        self._server = ForkServer(settings, isolation="landlock")

    async def start(self) -> None:
        """See base.Backend."""
        if sys.platform != "linux":
            raise BackendError("Landlock exists on Linux only")
        is_root = os.getuid() == 0
        abi, needed = linux.landlock_abi(), _MIN_ABI if is_root else _MIN_ABI_SAME_UID
        if abi < needed:
            found = f"has Landlock ABI {abi}" if abi else "has no Landlock"
            raise BackendError(f"this kernel {found}; {needed} is needed ({'Linux 6.2' if is_root else 'Linux 6.12'})")
        try:
            seccomp.program(os.uname().machine)
        except KeyError as error:
            raise BackendError(f"no system call table for this machine: {error}") from error
        if is_root and (closed := _closed_folder()):
            raise BackendError(
                f"sessions get uids of their own, and {closed} is closed to them: install Python elsewhere"
            )
        who = "a uid for each session" if is_root else "the service's own uid"
        self.isolation = (
            f"no namespaces: Landlock ABI {abi} (files, TCP{', signals' if abi >= _MIN_ABI_SAME_UID else ''}); {who}; "
            "seccomp allow-list without sockets; no capabilities; rlimits; memory and disk watchdog"
        )
        self.degraded = [
            "no control groups: memory, also the kernel's for pipes and sockets, disk and processes are watched by "
            "polling, CPU is not shared out",
            "sessions see the names and sizes of files, though not what is in them",
        ]
        if not is_root:
            self.degraded.append("sessions and the service share one uid")
        await self._server.start()

    async def spawn(self) -> Child:
        """See base.Backend."""
        return await self._server.spawn()

    async def stop(self) -> None:
        """See base.Backend."""
        await self._server.stop()


def _closed_folder() -> str | None:
    """The outermost parent folder of Python's libraries that other users cannot enter."""
    for library in isolate.library_folders():
        for folder in [*reversed(Path(library).parents), Path(library)]:
            if not folder.stat().st_mode & 0o001:
                return str(folder)
    return None
