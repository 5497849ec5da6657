"""Pid 1 of a session's container: imports the libraries, forks the one worker, and acts for the service inside.

It alone communicates with the service, over the container's stdio, and forwards the worker's frames. The worker has the
same uid and can at most end it, which ends the container. Pid 1 receives no signal from inside that it does not handle,
and is not dumpable, so it cannot be traced. A program that opens its descriptors anyway (gVisor allows that) lacks the
key of its frames. Independent of Docker.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import Any

from sandbox.backends import cgroups, isolate, kernel_memory, linux, muxing, processes, seccomp, session

_READ_BYTES = 65_536
_MAX_READS = 64
_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def main(config_json: str) -> None:
    """Entry point. Returns when the service closes the connection or the worker has ended."""
    config = json.loads(config_json)
    linux.set_dumpable(False)
    out_fd = os.dup(1)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)  # so that output of a library does not mix with the frames
    session.preload(config["preload"])
    init = Init(out_fd, isolate.SessionLimits(**config["limits"]))
    init.serve()


class Init:
    """The worker's parent."""

    def __init__(self, out_fd: int, limits: isolate.SessionLimits) -> None:
        self._out_fd = out_fd
        self._framer, self._parser = muxing.Framer(), muxing.Parser()
        self._event("hello", version=muxing.PROTOCOL_VERSION)
        control, theirs = socket.socketpair()
        pipes = {channel: os.pipe() for channel in (muxing.STDOUT, muxing.STDERR)}
        self._past_oom_kills = _oom_kills()
        self._is_running_a_call = self._is_over_limit = False
        self._next_watch = 0.0
        self._pid = os.fork()
        if self._pid == 0:
            fds = [theirs.detach(), *(pipe[1] for pipe in pipes.values())]
            session.become_worker(fds, lambda: _confine(limits))
        theirs.close()
        self._control = control
        self._outputs = {channel: pipe[0] for channel, pipe in pipes.items()}
        for _, write in pipes.values():
            os.close(write)
        for fd in (control.fileno(), *self._outputs.values()):
            os.set_blocking(fd, False)
        self._pending = bytearray()  # for the worker, which may not be reading
        self._selector = selectors.DefaultSelector()
        # only now, because a fork would inherit the keys; the worker has not run any program yet
        for end in (self._parser, self._framer):
            end.use_key(_read_exactly(0, muxing.KEY_BYTES))

    def serve(self) -> None:
        """Forward data in both directions until one end closes."""
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, selectors.EVENT_READ, self._obey)
        self._selector.register(self._control, selectors.EVENT_READ, self._pass_control)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 4096) != b"")
        for channel, fd in self._outputs.items():
            self._selector.register(fd, selectors.EVENT_READ, lambda channel=channel: self._pass_output(channel))
        with contextlib.suppress(BrokenPipeError):
            while self._is_running():
                ready = self._selector.select(kernel_memory.WATCH_INTERVAL_S if self._is_running_a_call else None)
                self._watch()
                for key, mask in ready:
                    if key.fileobj is self._control and mask & selectors.EVENT_WRITE:
                        self._flush_pending()
                    elif mask & selectors.EVENT_READ and not key.data():
                        if key.fd == 0:
                            return
                        self._selector.unregister(key.fileobj)

    def _is_running(self) -> bool:
        """Reap ended processes. False, after forwarding its last output, when the worker has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._pid:
                    self._drain()
                    self._event(
                        "exit",
                        exit_code=os.waitstatus_to_exitcode(status),
                        cpu_s=usage.ru_utime + usage.ru_stime,
                        peak_rss_bytes=usage.ru_maxrss * 1024,
                        is_oom=self._is_over_limit or _oom_kills() > self._past_oom_kills,
                    )
                    return False
        return True

    def _watch(self) -> None:
        """End the worker once the session holds too much of what the engine does not limit."""
        if self._is_running_a_call and time.monotonic() >= self._next_watch:
            held = kernel_memory.held([pid for pid in _pids() if pid != 1])
            if held.num_records > kernel_memory.MAX_RECORDS:
                self._is_over_limit = True
                os.kill(self._pid, signal.SIGKILL)
            self._next_watch = time.monotonic() + kernel_memory.WATCH_INTERVAL_S

    # -- from the worker ----------------------------------------------------------------------------------------

    def _pass_control(self) -> bool:
        try:
            data = self._control.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if data:
            self._emit(muxing.CONTROL, data)
        else:
            os.kill(self._pid, signal.SIGKILL)  # without its control line it cannot be used
        return bool(data)

    def _pass_output(self, channel: bytes) -> bool:
        try:
            data = os.read(self._outputs[channel], _READ_BYTES)
        except BlockingIOError:
            return True
        self._emit(channel, data)
        return bool(data)

    def _drain(self) -> None:
        """Forward what the pipes hold. Bounded, because a process may still be writing."""
        for fd, channel in ((fd, channel) for channel, fd in self._outputs.items()):
            for _ in range(_MAX_READS):
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                self._emit(channel, data)

    # -- from the service ---------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        data = os.read(0, _READ_BYTES)
        for channel, payload in self._parser.feed(data):
            if channel == muxing.CONTROL:
                self._pending += payload
            else:
                self._order(json.loads(payload))
        self._flush_pending()
        return bool(data)

    def _flush_pending(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or the worker ended
            while self._pending:
                del self._pending[: self._control.send(self._pending[:_READ_BYTES])]
        with contextlib.suppress(KeyError):  # gone with the worker
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending else 0)
            self._selector.modify(self._control, wanted, self._pass_control)

    def _order(self, order: dict[str, Any]) -> None:
        match order["op"]:
            case "signal":
                if order["signum"] == signal.SIGCONT:
                    self._is_running_a_call, self._next_watch = True, time.monotonic() + kernel_memory.WATCH_INTERVAL_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, order["signum"])
            case "settle":
                self._settle()
            case "restrict":
                limits = {
                    resource.RLIMIT_AS: isolate.address_space_bytes(self._pid) + order["memory_bytes"],
                    resource.RLIMIT_NPROC: order["num_processes"] + 1,  # this process counts too
                }
                for kind, value in limits.items():
                    value = min(value, resource.prlimit(self._pid, kind)[1])
                    resource.prlimit(self._pid, kind, (value, value))

    def _settle(self) -> None:
        self._is_running_a_call = False
        os.kill(self._pid, signal.SIGSTOP)
        kills, is_clean = processes.Kills(), True
        while strays := self._strays():
            if not (is_clean := kills.again(strays)):
                break
            time.sleep(processes.KILL_PAUSE_S)
        os.kill(self._pid, signal.SIGSTOP)  # again, because one of them may have continued it
        self._drain()
        usage = {"cpu_s": processes.cpu_s(self._pid), "peak_rss_bytes": processes.peak_rss_bytes(self._pid)}
        self._past_oom_kills = _oom_kills()  # what ended in this call must not explain the next call's end
        self._event("settled", is_clean=is_clean, **usage)

    def _strays(self) -> list[int]:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, self._pid)]
        return [pid for pid in others if processes.is_alive(pid)]

    def _event(self, name: str, **fields: object) -> None:
        self._emit(muxing.EVENT, json.dumps({"event": name, **fields}).encode())

    def _emit(self, channel: bytes, data: bytes) -> None:
        view = memoryview(self._framer.frames(channel, data))
        while view:
            view = view[os.write(self._out_fd, view) :]


def _confine(limits: isolate.SessionLimits) -> None:
    linux.set_dumpable(True)
    isolate.die_first()  # and never pid 1
    os.chdir(isolate.WORK_FOLDER)
    _set_rlimits(limits)
    linux.drop_capabilities()
    linux.no_new_privileges()
    seccomp.install()


def _set_rlimits(limits: isolate.SessionLimits) -> None:
    try:
        isolate.set_rlimits(limits, num_other_tasks=1)
    except ValueError:
        # gVisor refuses limits that it does not implement (message queues, queued signals); those come last
        has_rest = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == 0
        if not has_rest or resource.getrlimit(resource.RLIMIT_FSIZE)[1] != limits.disk_bytes:
            raise


def _pids() -> list[int]:
    """Every process of the container."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _oom_kills() -> int:
    return sum(map(cgroups.oom_kills, _OOM_FILES))


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if not (piece := os.read(fd, num_bytes - len(data))):
            sys.exit("the service hung up")
        data += piece
    return data


if __name__ == "__main__":
    main(sys.argv[1])
