"""The process that imports the libraries once and forks an isolated interpreter for every session.

It is single-threaded, so that forking is safe. It is pid 1 of a pid namespace around all sessions, so that its death,
for any reason, ends every one of them; without namespaces a keeper process above it does that. Independent of HTTP,
executions and clients. Messages are JSON packets on one socket. It receives {id, uid, folder, limits} with the
descriptors control, stdout, stderr and those of the control groups to join, and sends {event: ready | failed | spawned
| exit, ...}.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from typing import Any, Literal

from sandbox.backends import folders, isolate, linux, processes, session

Isolation = Literal["namespaces", "landlock", "none"]
"""What isolates a session from the host, in addition to its resource limits."""

_MAX_PACKET_BYTES = 65_536
_NUM_FDS, _MAX_GROUPS = 3, 3


def main(config_json: str) -> None:
    """Entry point of the zygote's process. Returns when the service closes the socket."""
    config = json.loads(config_json)
    control = socket.socket(fileno=config["fd"])
    try:
        linux.die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if config["isolation"] == "namespaces":
            _enter_namespaces(config["first_uid"], is_charged=config["is_charged"])
        else:
            _go_below_a_keeper(config["folder"])
        session.preload(config["preload"])
    except ModuleNotFoundError as error:
        _send(control, {"event": "failed", "error": f"a module to preload is not installed here: {error.name}"})
        return
    except Exception as error:
        _send(control, {"event": "failed", "error": f"{type(error).__name__}: {error}"})
        return
    Zygote(control, config["isolation"]).serve()


def _go_below_a_keeper(folder: str) -> None:
    """The calling process becomes the keeper: once service or zygote end, it ends all below it and removes `folder`."""
    linux.adopt_orphans()
    linux.die_with_parent(signal.SIGTERM)
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if pid := os.fork():
        os.closerange(3, 256)
        while signal.sigwait(awaited) == signal.SIGCHLD and not os.waitpid(pid, os.WNOHANG)[0]:
            pass  # an orphan ended
        while pids := processes.descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        folders.remove(folder)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    linux.die_with_parent(signal.SIGKILL)


def _enter_namespaces(first_uid: int, *, is_charged: bool) -> None:
    """Move into the shared namespaces. The calling process stays outside, waits, and never returns from here."""
    is_root = os.getuid() == 0
    if is_root:
        linux.unshare(linux.CLONE_NEWNS)
        isolate.build_root(is_charged=is_charged)
    isolate.enter_user_namespace(build=not is_root, first_uid=first_uid, is_charged=is_charged)
    linux.die_with_parent(signal.SIGKILL)
    if pid := os.fork():
        os.closerange(3, 256)
        os.waitpid(pid, 0)
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)
    isolate.mount_proc()


class Zygote:
    """The fork loop."""

    def __init__(self, control: socket.socket, isolation: Isolation) -> None:
        self._control, self._isolation = control, isolation
        self._ids: dict[int, str] = {}  # pid -> id
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork on request and report exits, until the service closes the socket."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._isolation != "namespaces":
            linux.adopt_orphans()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            _send(self._control, {"event": "ready"})
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._control:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                    elif not self._answer():
                        return
                self._reap()
                if self._isolation != "namespaces":
                    self._end_orphans()

    def _answer(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, _MAX_PACKET_BYTES, _NUM_FDS + _MAX_GROUPS)
        if not packet:
            return False
        request = json.loads(packet)
        try:
            pid = self._fork(request, fds)
        except OSError as error:
            _send(self._control, {"event": "exit", "id": request["id"], "error": str(error)})
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self._ids[pid] = request["id"]
        handle = os.pidfd_open(pid)
        _send(self._control, {"event": "spawned", "id": request["id"]}, [handle])
        os.close(handle)
        return True

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        if self._isolation == "namespaces":
            # the first child after unshare(NEWPID) is pid 1; returning to the own namespace first allows repeating it
            linux.setns(self._own_pid_namespace, linux.CLONE_NEWPID)
            linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            groups = fds[_NUM_FDS:]
            session.become_worker(fds[:_NUM_FDS], lambda: _enter(request, self._isolation, bool(groups)), groups=groups)
        return pid

    def _end_orphans(self) -> None:
        """End orphans. Sessions adopt their own, so a child of this process that is not a session outlived one."""
        for pid in processes.children(os.getpid()):
            if pid not in self._ids:
                for orphan in [pid, *processes.descendants(pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (name := self._ids.pop(pid, None)) is not None:
                report = {
                    "exit_code": os.waitstatus_to_exitcode(status),
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "peak_rss_bytes": usage.ru_maxrss * 1024,
                }
                _send(self._control, {"event": "exit", "id": name, **report})


def _enter(request: dict[str, Any], isolation: Isolation, is_charged: bool) -> None:
    """In a session's process, before the worker starts: isolate it."""
    limits = isolate.SessionLimits(**request["limits"])
    if isolation == "namespaces":
        isolate.isolate_session(uid=request["uid"], limits=limits, is_charged=is_charged)
        return
    os.environ["HOME"] = os.environ["TMPDIR"] = request["folder"]
    linux.adopt_orphans()
    if isolation == "landlock":
        isolate.confine_session(uid=request["uid"], folder=request["folder"], limits=limits)
        return
    isolate.die_first()
    linux.die_with_parent(signal.SIGKILL)
    os.chdir(request["folder"])
    isolate.set_rlimits(limits, num_other_tasks=processes.num_tasks(os.getuid()))


def _send(control: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], fds or [])
