"""Runs one command in its own process group and ends the group when the supervisor ends.

Started as a plain file with `python -I -S orphan_guard.py GRACE_S FOLDER COMMAND...`. The supervisor holds the other
end of standard input: when it closes that end, or dies by any means including kill -9, the command's whole group gets
SIGTERM, and SIGKILL after GRACE_S seconds. FOLDER, unless empty, is made for the command's temporary files (TMPDIR) and
removed after the group's end. Imports nothing of agentrl, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

TRACKER = b"multiprocessing.resource_tracker"
TRACKER_GRACE_S = 2.0


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code (128 + signal when a signal ended it)."""
    grace_s, folder, command = float(arguments[0]), arguments[1], arguments[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.environ["TMPDIR"] = folder
        return _run(command, grace_s)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], grace_s: float) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(process.pid, signal.SIGTERM))
    threading.Thread(target=_stop_at_end_of_input, args=(process, grace_s), daemon=True).start()
    code = process.wait()
    _end_group(process.pid)  # grandchildren that ignored SIGTERM, or outlived a crashed parent
    return code if code >= 0 else 128 - code


def _stop_at_end_of_input(process: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        for pid in _members(process.pid):
            kill_unless_tracker(pid)


def _end_group(group: int) -> None:
    """End what is left of the group, its resource trackers last."""
    for pid in _members(group):
        kill_unless_tracker(pid)
    deadline = time.monotonic() + TRACKER_GRACE_S
    while any(True for _ in _members(group)) and time.monotonic() < deadline:
        time.sleep(0.01)
    _signal_group(group, signal.SIGKILL)


def kill_unless_tracker(pid: int) -> None:
    """SIGKILL, except for Python's resource tracker: it removes the semaphores of the others when they have ended, and
    then ends itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if TRACKER not in file.read():
                os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended


def _members(group: int) -> Iterator[int]:
    """The processes of the group that have not ended."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, found = file.read().rpartition(b")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(found) == group and state not in b"ZX":
            yield int(name)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
