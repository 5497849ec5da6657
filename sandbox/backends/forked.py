"""One interpreter that a zygote on this host forked, controlled by descriptors. Independent of executions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Any

from sandbox.backends import folders, isolate, kernel_memory, processes
from sandbox.backends.base import BackendError, Exit, Listener, Stream, Usage
from sandbox.backends.cgroups import Cgroup, CgroupParent
from sandbox.protocol import Limits

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0
_READ_BYTES = 65_536
_MAX_READS = 64  # per pipe, because a process may still be writing


class ForkedChild:
    """See base.Child. `folder` is its work folder on the host, if it has no file system of its own."""

    def __init__(
        self,
        *,
        control: socket.socket,
        stdout_fd: int,
        stderr_fd: int,
        folder: str | None,
        limits: Limits,
        disk_bytes: int,
    ) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.spawned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_watched = True
        self.folder = folder
        self._control, self._fds = control, {"stdout": stdout_fd, "stderr": stderr_fd}
        self._listener: Listener | None = None
        self._limits, self._disk_bytes = limits, disk_bytes
        self._cgroups: CgroupParent | None = None
        self._cgroup: Cgroup | None = None
        self._pidfd = -1
        self._pid = 0  # in this process's pid namespace
        self._inherited_bytes = self._num_inherited_maps = 0

    # -- what it says -------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """See base.Child."""
        self._listener = listener
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._read_control)
        loop.add_reader(self._fds["stdout"], self._read_output, "stdout")
        loop.add_reader(self._fds["stderr"], self._read_output, "stderr")

    async def send(self, data: bytes) -> None:
        """See base.Child."""
        await asyncio.get_running_loop().sock_sendall(self._control, data)

    def _read_control(self) -> None:
        assert self._listener is not None
        try:
            data = self._control.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
        self._listener.on_control(data)

    def _read_output(self, stream: Stream) -> bool:
        """Pass on the data of one read. False when there was none."""
        assert self._listener is not None
        try:
            data = os.read(self._fds[stream], _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fds[stream])
            return False
        self._listener.on_output(stream, data)
        return True

    # -- its life -----------------------------------------------------------------------------------------------

    def adopt(self, pidfd: int) -> None:
        """Take the pidfd of the forked process. Unlike a pid, a descriptor is never reused."""
        self._pidfd = pidfd
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                self._pid = int(line.split()[1])
        self._inherited_bytes = processes.own_memory_bytes(self._pid, with_shared=self.folder is not None)
        if self._cgroup is None:
            self._num_inherited_maps = kernel_memory.num_maps(self._pid)
        if not self.spawned.done():
            self.spawned.set_result(None)

    def report_exit(self, event: dict[str, Any]) -> None:
        """Record the end: the zygote reaped the process, or died with it."""
        if not self.spawned.done():
            self.spawned.set_exception(BackendError(event.get("error", "the zygote ended")))
        if not self.exited.done():
            usage = {"cpu_s": event.get("cpu_s", 0.0), "peak_rss_bytes": event.get("peak_rss_bytes", 0)}
            is_oom = self._cgroup is not None and self._cgroup.num_oom_kills() > 0
            is_failure = "error" in event  # no program can end the zygote where sessions are isolated
            exited = Exit(exit_code=event.get("exit_code"), is_oom=is_oom, is_failure=is_failure, **usage)
            self.exited.set_result(exited)

    def take_cgroup(self, parent: CgroupParent) -> list[int]:
        """Take a control group for the process. Returns the descriptors with which it joins. Raises OSError."""
        self._cgroups, self._cgroup = parent, parent.take()
        self._limit_cgroup()
        return self._cgroup.open_procs()

    def _limit_cgroup(self) -> None:
        if self._cgroup is not None:
            limits = self._limits
            self._cgroup.limit(memory_bytes=limits.memory_bytes, num_processes=limits.num_processes, cpus=1.0)

    def signal(self, signum: int) -> None:
        """See base.Child."""
        if self._pidfd >= 0 and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    async def settle(self) -> bool:
        """See base.Child."""
        self.signal(signal.SIGSTOP)
        is_clean = await self._end_strays()
        self.signal(signal.SIGSTOP)  # again, because one of them may have continued it
        for stream in ("stdout", "stderr"):
            for _ in range(_MAX_READS):
                if self._fds[stream] < 0 or not self._read_output(stream):
                    break
        if self._cgroup is not None and not self.exited.done():
            self._cgroup.forget_oom_kills()  # a child's end in this call must not explain the next call's end
        return is_clean

    def _strays(self) -> list[int]:
        if self._cgroup is not None:
            return [pid for pid in self._cgroup.processes() if pid not in (self._pid, 0)]
        return processes.descendants(self._pid)

    async def _end_strays(self) -> bool:
        """Kill every other process of the session. Repeats, because some fork meanwhile and kills take a moment."""
        kills = processes.Kills()
        while not self.exited.done() and (strays := self._strays()):
            if not kills.again(strays):
                return False
            await asyncio.sleep(processes.KILL_PAUSE_S)
        return True

    async def close(self) -> None:
        """See base.Child."""
        if self.folder is not None:  # there is no pid namespace that ends the others
            await self._end_strays()
        self.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.shield(self.exited)
        self._release()
        if self._cgroup is not None and self._cgroups is not None:
            cgroup, self._cgroup = self._cgroup, None
            if not await asyncio.to_thread(self._cgroups.give_back, cgroup):
                log.warning("a control group could not be removed: a process in it does not die")
        if self.folder is not None:
            await asyncio.to_thread(folders.remove, self.folder)

    def _release(self) -> None:
        """Close every descriptor, once."""
        loop = asyncio.get_running_loop()
        if self._control.fileno() >= 0:
            loop.remove_reader(self._control)
            self._control.close()
        for stream, fd in self._fds.items():
            if fd >= 0:
                loop.remove_reader(fd)
                os.close(fd)
                self._fds[stream] = -1
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    # -- what it uses -------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """See base.Child."""
        return Usage(cpu_s=processes.cpu_s(self._pid), peak_rss_bytes=processes.peak_rss_bytes(self._pid))

    def is_over_limit(self) -> bool:
        """See base.Child."""
        pids = [self._pid, *self._strays()]
        held = kernel_memory.held(pids)
        if held.num_records > kernel_memory.MAX_RECORDS:
            return True
        if self._cgroup is not None:
            return False
        memory_bytes = self._memory_bytes(pids) + held.num_bytes
        if memory_bytes > self._limits.memory_bytes or len(pids) > self._limits.num_processes:
            return True
        if self.folder is None:  # it has file systems of its own, of limited size
            return False
        return folders.size_bytes(self.folder) + processes.deleted_bytes(pids, self.folder) > self._disk_bytes

    def _memory_bytes(self, pids: list[int]) -> int:
        """What the processes hold in pages, in file systems of their own, and in descriptions of both."""
        has_files = self.folder is None  # then all memory that they can share belongs to those files
        own = sum(
            max(processes.own_memory_bytes(pid, with_shared=not has_files) - self._inherited_bytes, 0) for pid in pids
        )
        own += kernel_memory.maps_bytes(pids, num_inherited=self._num_inherited_maps)
        if has_files:
            root = f"{kernel_memory.live_thread(self._pid)}/root"
            own += kernel_memory.files_bytes(root + folder for folder in isolate.OWN_FOLDERS)
        return own

    async def restrict(self, limits: Limits) -> None:
        """See base.Child."""
        self._limits = limits
        self._limit_cgroup()
        address_space = isolate.address_space_bytes(self._pid) + limits.memory_bytes
        for kind, value in ((resource.RLIMIT_AS, address_space), (resource.RLIMIT_NPROC, limits.num_processes)):
            try:
                value = min(value, resource.prlimit(self._pid, kind)[1])
                resource.prlimit(self._pid, kind, (value, value))
            except PermissionError:  # a session with another uid, in a container without CAP_SYS_RESOURCE
                if self._cgroup is not None:
                    raise
