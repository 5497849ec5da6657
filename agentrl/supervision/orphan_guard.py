"""Runs one command and ends every process that comes from it when the command or the supervisor ends.

Started as a plain file with `python -I -S orphan_guard.py GRACE_S FOLDER REPORT COMMAND...`. The supervisor holds the
other end of standard input: when it closes that end, or dies by any means including kill -9, the command's process
group gets SIGTERM, and all descendants get SIGKILL after GRACE_S seconds. The guard adopts orphaned descendants, so
that it also finds those with a session of their own, such as torchrun's ranks. When the guard itself is killed, the
kernel kills the command, and the supervisor ends the rest (process_tree.py). FOLDER, unless empty, is made for the
command's temporary files (TMPDIR) and removed afterwards. REPORT, unless empty, is a descriptor: the guard leaves the
process that started it, and writes its number and later the exit code there, a line each. Imports nothing of agentrl,
so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

MARK_VARIABLE = "AGENTRL_PART"
"""In the environment of all processes of a part; its value finds those that are left over."""
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_GRACE_S = 2.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code (128 + signal when a signal ended it)."""
    grace_s, folder, report, command = float(arguments[0]), arguments[1], arguments[2], arguments[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if report:
        _leave_starter(int(report))
    try:
        if folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.environ["TMPDIR"] = folder
        code = _run(command, grace_s)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if report:
        _report(int(report), code)
    return code


def _leave_starter(report: int) -> None:
    """Go on in a process that is no child of the one that started this: Ray kills the children of its workers."""
    if os.fork():
        os._exit(0)
    os.setsid()
    _report(report, os.getpid())


def _report(descriptor: int, number: int) -> None:
    try:
        os.write(descriptor, b"%d\n" % number)
    except OSError:
        return  # the one who wanted to know has ended


def _run(command: list[str], grace_s: float) -> int:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A group of its own, to be signalled without the guard, in the guard's session, by which the supervisor finds it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_ends_with(os.getpid(), prctl)
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(process.pid, signal.SIGTERM))
    threading.Thread(target=_stop_at_end_of_input, args=(process.pid, ended, grace_s), daemon=True).start()
    code = process.returncode = _wait(process.pid)
    ended.set()
    _end_descendants()
    return code if code >= 0 else 128 - code


def _ends_with(guard: int, prctl: Callable[..., int]) -> Callable[[], None]:
    """What the new process does before it becomes the command: it asks the kernel to be killed with the guard."""

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:  # which ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _wait(command: int) -> int:
    """The command's exit code, or minus its signal. Reaps adopted processes that end before it."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command:
            return os.waitstatus_to_exitcode(status)


def _stop_at_end_of_input(command: int, ended: threading.Event, grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(command, signal.SIGTERM)
    if not ended.wait(grace_s):
        for pid in _descendants():
            kill_unless_tracker(pid)


def _end_descendants() -> None:
    """Kill what is left: what ignored SIGTERM, or outlived a crashed parent. Resource trackers are last."""
    deadline = time.monotonic() + TRACKER_GRACE_S
    while _has_children() and time.monotonic() < deadline:
        for pid in _descendants():
            kill_unless_tracker(pid)
        time.sleep(0.01)
    for pid in _descendants() if _has_children() else ():
        _kill(pid)


def _has_children() -> bool:
    """Whether a descendant is alive: a process that adopts orphans has descendants only while it has children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants() -> list[int]:
    """The processes below this one, as far as one look at /proc shows them."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in processes():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of all processes of this machine."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent, _, session = map(int, file.read().rpartition(b")")[2].split()[1:4])
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(name), parent, session


def kill_unless_tracker(pid: int) -> None:
    """SIGKILL, except for Python's resource tracker: it removes the semaphores of the others when they have ended, and
    then ends itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            is_tracker = TRACKER in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended
    if not is_tracker:
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # it has ended, or changed its user


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
