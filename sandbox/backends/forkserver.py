"""The service's hand on a zygote: starts it, asks it for children, hears of their ends. Knows nothing of executions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sandbox.backends import isolate, processes
from sandbox.backends.base import BackendError, Exit, Usage
from sandbox.backends.cgroups import Cgroup, CgroupParent
from sandbox.protocol import Limits

log = logging.getLogger(__name__)

PRELOAD = (
    "numpy",
    "numpy.random",
    "sympy",
    "math",
    "fractions",
    "decimal",
    "itertools",
    "collections",
    "functools",
    "statistics",
    "re",
)
START_DEADLINE_S = 60.0
SPAWN_DEADLINE_S = 15.0
CLOSE_DEADLINE_S = 5.0

_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "HOME": isolate.WORK_FOLDER,
    "TMPDIR": "/tmp",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # an arena a thread would use up the address space limit
}
"""All that a session sees: an allow-list, nothing is inherited."""

_BOOT = """
import sys
root, config = sys.argv[1:]
sys.argv[:] = [""]
sys.path.insert(0, root)
from sandbox.backends.zygote import main
sys.path.remove(root)
main(config)
"""


class ForkedChild:
    """See base.Child."""

    def __init__(self, *, control_fd: int, stdout_fd: int, stderr_fd: int, folder: str | None) -> None:
        self.control_fd, self.stdout_fd, self.stderr_fd = control_fd, stdout_fd, stderr_fd
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.spawned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_memory_cgroup = False
        self._folder = folder
        self._cgroup: Cgroup | None = None
        self._pidfd = -1
        self._pid = 0  # as this process sees it

    def adopt(self, pidfd: int) -> None:
        """The zygote forked it: hold it by a descriptor, which unlike a pid is never reused."""
        self._pidfd = pidfd
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                self._pid = int(line.split()[1])
        if not self.spawned.done():
            self.spawned.set_result(None)

    def report_exit(self, event: dict[str, Any]) -> None:
        """The zygote waited for it, or died with it."""
        if not self.spawned.done():
            self.spawned.set_exception(BackendError(event.get("error", "the zygote ended")))
        if not self.exited.done():
            usage = {"cpu_s": event.get("cpu_s", 0.0), "peak_rss_bytes": event.get("peak_rss_bytes", 0)}
            is_oom = self._cgroup is not None and self._cgroup.num_oom_kills() > 0
            self.exited.set_result(Exit(exit_code=event.get("exit_code"), is_oom=is_oom, **usage))

    def join_cgroup(self, cgroup: Cgroup) -> None:
        """Blocks for some milliseconds: the kernel waits for other processors. Raises OSError."""
        self._cgroup = cgroup
        cgroup.attach(self._pid)
        self.has_memory_cgroup = True

    def signal(self, signum: int) -> None:
        """See base.Child."""
        if self._pidfd >= 0 and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def usage(self) -> Usage:
        """See base.Child."""
        return Usage(cpu_s=processes.cpu_s(self._pid), peak_rss_bytes=processes.peak_rss_bytes(self._pid))

    def memory_bytes(self) -> int:
        """See base.Child."""
        return sum(processes.pss_bytes(pid) for pid in [self._pid, *processes.descendants(self._pid)])

    def _strays(self) -> list[int]:
        if self._cgroup is not None:
            return [pid for pid in self._cgroup.processes() if pid not in (self._pid, 0)]
        return processes.descendants(self._pid)

    def end_strays(self) -> bool:
        """See base.Child."""
        if self.exited.done() or not (strays := self._strays()):
            return True
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not self._strays()

    def restrict(self, limits: Limits) -> None:
        """See base.Child."""
        if self._cgroup is not None:
            self._cgroup.limit(memory_bytes=limits.memory_bytes, num_processes=limits.num_processes, cpus=1.0)
        address_space = isolate.address_space_bytes(self._pid) + limits.memory_bytes
        for kind, value in ((resource.RLIMIT_AS, address_space), (resource.RLIMIT_NPROC, limits.num_processes)):
            value = min(value, resource.prlimit(self._pid, kind)[1])
            resource.prlimit(self._pid, kind, (value, value))

    async def close(self) -> None:
        """See base.Child."""
        if self._folder is not None:  # no pid namespace here to take the others along
            self.end_strays()
        self.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.shield(self.exited)
        for fd in (self.control_fd, self.stdout_fd, self.stderr_fd, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self.control_fd = self.stdout_fd = self.stderr_fd = self._pidfd = -1
        if self._cgroup is not None and not await asyncio.to_thread(self._cgroup.remove):
            log.warning("a control group could not be removed: a process in it does not die")
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class ForkServer:
    """A zygote process and its children; after the zygote's death the next spawn starts another."""

    def __init__(self, *, namespaces: bool, limits: Limits, disk_bytes: int, cgroups: CgroupParent | None) -> None:
        self._namespaces, self._limits, self._disk_bytes, self._cgroups = namespaces, limits, disk_bytes, cgroups
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._children: dict[str, ForkedChild] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the zygote if none runs. Raises BackendError."""
        async with self._starting:
            if self._socket is not None:
                return
            self._launch()
            assert self._ready is not None
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    await self._ready
            except TimeoutError:
                await self.stop()
                raise BackendError(f"the zygote was not ready within {START_DEADLINE_S:.0f} s") from None

    def _launch(self) -> None:
        """On the event loop's own thread: the kernel ties the zygote's life to the thread that starts it."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {"fd": theirs.fileno(), "namespaces": self._namespaces, "preload": PRELOAD}
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _BOOT, root, json.dumps(config)],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.setblocking(False)
        self._socket, self._ready = ours, loop.create_future()
        loop.add_reader(ours, self._receive)

    def _receive(self) -> None:
        assert self._socket is not None and self._ready is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self._socket, 65_536, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._zygote_died("the zygote ended")
            return
        event = json.loads(packet)
        match event["event"]:
            case "ready":
                self._ready.set_result(None)
            case "failed":
                self._zygote_died(event["error"])
            case "spawned":
                child = self._children.get(event["id"])
                child.adopt(fds[0]) if child else os.close(fds[0])
            case "exit":
                if child := self._children.pop(event["id"], None):
                    child.report_exit(event)

    def _zygote_died(self, reason: str) -> None:
        if self._socket is None or self._ready is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        if not self._ready.done():
            self._ready.set_exception(BackendError(reason))
        for child in self._children.values():
            child.report_exit({"error": reason})
        self._children.clear()
        if self._process is not None:
            self._process.kill()

    async def spawn(self) -> ForkedChild:
        """A fresh child; its worker has not reported yet. Raises BackendError."""
        await self.start()
        number = next(self._numbers)
        name = str(number)
        child, theirs = self._make_child()
        limits = {**self._limits.model_dump(), "disk_bytes": self._disk_bytes}
        uid = 1 + number % (isolate.NUM_HOST_UIDS - 1) if os.getuid() == 0 else 0
        request = {"op": "spawn", "id": name, "uid": uid, "folder": child._folder, "limits": limits}
        self._children[name] = child
        try:
            async with asyncio.timeout(SPAWN_DEADLINE_S):
                assert self._socket is not None
                socket.send_fds(self._socket, [json.dumps(request).encode()], theirs)
                for fd in theirs:
                    os.close(fd)
                theirs = []
                await child.spawned
                if self._cgroups is not None:
                    await asyncio.to_thread(self._join, child, self._cgroups, f"session-{name}")
        except (OSError, TimeoutError, AssertionError) as error:
            await child.close()
            raise BackendError(f"a session could not be started: {type(error).__name__}: {error}") from error
        except BaseException:
            await asyncio.shield(child.close())
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return child

    def _join(self, child: ForkedChild, parent: CgroupParent, name: str) -> None:
        cgroup = parent.create(name)
        cgroup.limit(memory_bytes=self._limits.memory_bytes, num_processes=self._limits.num_processes, cpus=1.0)
        child.join_cgroup(cgroup)

    def _make_child(self) -> tuple[ForkedChild, list[int]]:
        """Our ends in a child object; the other ends as [control, stdout, stderr]."""
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        for fd in (ours.fileno(), out_read, err_read):
            os.set_blocking(fd, False)
        folder = None if self._namespaces else tempfile.mkdtemp(prefix="sandbox-")
        child = ForkedChild(control_fd=ours.detach(), stdout_fd=out_read, stderr_fd=err_read, folder=folder)
        return child, [theirs.detach(), out_write, err_write]

    async def stop(self) -> None:
        """End the zygote, and with it every child."""
        children = list(self._children.values())
        self._zygote_died("the service is stopping")
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
            self._process = None
        for child in children:
            await child.close()
