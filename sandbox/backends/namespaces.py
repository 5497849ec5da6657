"""The `namespaces` backend: every session in its own user, pid, mount, net, ipc and uts namespaces, under seccomp.

Works for root (sessions get separate host uids) and for plain users. Independent of executions.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from sandbox.backends import cgroups, seccomp
from sandbox.backends.base import BackendError, BackendSettings, Child
from sandbox.backends.forkserver import ForkServer


class NamespacesBackend:
    """See base.Backend."""

    name = "namespaces"

    def __init__(self, settings: BackendSettings) -> None:
        self.isolation = ""
        self.degraded: list[str] = []
        self._settings = settings
        self._cgroups: cgroups.CgroupParent | None = None
        self._server: ForkServer | None = None
        self._janitor: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """See base.Backend."""
        if sys.platform != "linux":
            raise BackendError("namespaces exist on Linux only")
        try:
            seccomp.program(os.uname().machine)
        except KeyError as error:
            raise BackendError(f"no system call table for this machine: {error}") from error
        try:
            self._cgroups = await asyncio.to_thread(cgroups.open_parent, f"sandbox-{os.getpid()}")
        except OSError as error:
            self.degraded.append(
                f"no control groups ({error}): memory, also the kernel's for pipes and sockets, is watched by polling, "
                "CPU is not shared out; a plain user gets control groups from "
                "`systemd-run --user --scope -p Delegate=yes COMMAND`"
            )
        else:
            missing = {"memory", "pids", "cpu"} - set(self._cgroups.controllers)
            self.degraded += [f"no {name} control group" for name in sorted(missing)]
            self._janitor = _start_janitor(self._cgroups.folders)
        held = f"cgroup ({', '.join(self._cgroups.controllers)})" if self._cgroups else "memory watchdog"
        who = "an unprivileged host uid for each session" if os.getuid() == 0 else "the service's own unprivileged uid"
        self.isolation = (
            f"user, pid, mount, net, ipc and uts namespaces; {who}; seccomp allow-list; no capabilities; "
            f"read-only root, sized tmpfs; rlimits; {held}"
        )
        self._server = ForkServer(self._settings, isolation="namespaces", cgroups=self._cgroups)
        try:
            await self._server.start()
        except BaseException:
            await self.stop()
            raise

    async def spawn(self) -> Child:
        """See base.Backend."""
        if self._server is None:
            raise BackendError("the backend is not running")
        return await self._server.spawn()

    async def stop(self) -> None:
        """See base.Backend."""
        if self._server is not None:
            await self._server.stop()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.remove)
        if self._janitor is not None:
            await asyncio.to_thread(self._janitor.communicate)


def _start_janitor(folders: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that removes the control groups if the service is killed. The kernel only ends the processes."""
    script = str(Path(__file__).with_name("janitor.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, *folders], stdin=subprocess.PIPE, env={}, start_new_session=True
    )
