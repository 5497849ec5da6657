"""Controls a zygote: starts it, requests children, receives their exits. Independent of executions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from sandbox.backends import isolate
from sandbox.backends.base import BackendError, BackendSettings
from sandbox.backends.cgroups import CgroupParent
from sandbox.backends.forked import ForkedChild
from sandbox.backends.uids import NUM_UIDS, UidRange
from sandbox.backends.zygote import Isolation

START_DEADLINE_S = 60.0
SPAWN_DEADLINE_S = 15.0
STOP_DEADLINE_S = 5.0

_BOOT = """
import sys
root, config = sys.argv[1:]
sys.argv[:] = [""]
sys.path.insert(0, root)
from sandbox.backends.zygote import main
sys.path.remove(root)
main(config)
"""


class ForkServer:
    """A zygote process and its children. After the zygote's death the next spawn starts another."""

    def __init__(self, settings: BackendSettings, *, isolation: Isolation, cgroups: CgroupParent | None = None) -> None:
        self._settings, self._isolation, self._cgroups = settings, isolation, cgroups
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._children: dict[str, ForkedChild] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._uids: UidRange | None = None  # while a zygote runs, and only root has one
        self._folder: str | None = None  # holds the folders of all sessions; the zygote's keeper removes it

    async def start(self) -> None:
        """Start the zygote if none runs. Raises BackendError."""
        async with self._starting:
            if self._socket is not None:
                return
            try:
                self._launch()
            except OSError as error:
                raise BackendError(f"the zygote could not be started: {error}") from error
            assert self._ready is not None
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    await self._ready
            except TimeoutError:
                await self.stop()
                raise BackendError(f"the zygote was not ready within {START_DEADLINE_S:.0f} s") from None

    def _launch(self) -> None:
        """Start the zygote from the event loop's thread: the kernel ties the zygote's life to that thread."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self._uids is None and os.getuid() == 0 and self._isolation != "none":
            self._uids = UidRange.claim()
        if self._isolation != "namespaces":
            self._folder = tempfile.mkdtemp(prefix="sandbox-")
            os.chmod(self._folder, 0o711)  # sessions may traverse it, but not list it
        config = {
            "fd": theirs.fileno(),
            "isolation": self._isolation,
            "preload": self._settings.preload,
            "folder": self._folder,
            "first_uid": self._uids.first if self._uids else 0,
            "is_charged": self._cgroups is not None,
        }
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _BOOT, root, json.dumps(config)],
            env=isolate.ENVIRONMENT,
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
            self._process.terminate()  # the zygote's keeper ends the rest, and cleans up

    async def spawn(self) -> ForkedChild:
        """Fork a child. Its worker has not reported yet. Raises BackendError."""
        await self.start()
        number = next(self._numbers)
        name = str(number)
        try:
            child, theirs = self._make_child(self._uid(number))
        except OSError as error:  # no descriptors, no disk
            raise BackendError(f"a session could not be started: {error}") from error
        limits = {**self._settings.limits.model_dump(), "disk_bytes": self._settings.disk_bytes}
        request = {"id": name, "uid": self._uid(number), "folder": child.folder, "limits": limits}
        self._children[name] = child
        try:
            async with asyncio.timeout(SPAWN_DEADLINE_S):
                if self._cgroups is not None:
                    theirs += await _take_cgroup(child, self._cgroups)
                assert self._socket is not None
                socket.send_fds(self._socket, [json.dumps(request).encode()], theirs)
                for fd in theirs:
                    os.close(fd)
                theirs = []
                await child.spawned
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

    def _uid(self, number: int) -> int:
        """A separate host uid for each session if the service may assign uids, else 0: the service's own."""
        if self._uids is None:
            return 0
        offset = 1 + number % (NUM_UIDS - 1)
        return offset if self._isolation == "namespaces" else self._uids.first + offset

    def _make_child(self, uid: int) -> tuple[ForkedChild, list[int]]:
        """A child object with this side's descriptors, and the other side's as [control, stdout, stderr]."""
        with contextlib.ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            pipes: list[tuple[int, int]] = []
            for _ in ("stdout", "stderr"):
                pipes.append(os.pipe())
                for fd in pipes[-1]:
                    undo.callback(os.close, fd)
            ours.setblocking(False)
            for read, _ in pipes:
                os.set_blocking(read, False)
            folder = self._make_folder(uid)
            undo.pop_all()
        child = ForkedChild(
            control=ours,
            stdout_fd=pipes[0][0],
            stderr_fd=pipes[1][0],
            folder=folder,
            limits=self._settings.limits,
            disk_bytes=self._settings.disk_bytes,
        )
        return child, [theirs.detach(), pipes[0][1], pipes[1][1]]

    def _make_folder(self, uid: int) -> str | None:
        if self._isolation == "namespaces":
            return None
        folder = tempfile.mkdtemp(dir=self._folder)
        if uid:
            os.chown(folder, uid, uid)
        return folder

    async def stop(self) -> None:
        """End the zygote, and with it every child."""
        children = list(self._children.values())
        self._zygote_died("the service is stopping")
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
            self._process = None
        for child in children:
            await child.close()
        if self._uids is not None:
            self._uids.close()
            self._uids = None


async def _take_cgroup(child: ForkedChild, parent: CgroupParent) -> list[int]:
    """See ForkedChild.take_cgroup. Cancelled meanwhile, it leaves the group to the child and no descriptor."""
    taking = asyncio.create_task(asyncio.to_thread(child.take_cgroup, parent), name="control group")
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            for fd in await taking:
                os.close(fd)
        raise
