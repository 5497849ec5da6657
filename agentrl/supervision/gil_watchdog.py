"""The GIL watchdog: ends a run whose code never releases the interpreter's lock, so that no thread of it can run.

A process of its own, started as a plain file with `python -I -S gil_watchdog.py PATIENCE_S GRACE_S DUMP STACKS_FD`. The
watchdog thread of the run (watchdog.py) writes a byte to its standard input at every tick. After PATIENCE_S without
one, the run's process is made to write its stacks to STACKS_FD (faulthandler's signal handler needs no lock), they are
appended to DUMP, and the process is interrupted, then killed after GRACE_S more. `faulthandler.dump_traceback_later` is
no replacement: it counts time in which the process was stopped (docker pause, a debugger), would end a healthy run
after it, and cannot let the run clean up. Imports nothing of agentrl, so that it starts in milliseconds; ends with its
parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn  # not imported at run time: that would take as long as all the rest

STACKS = signal.SIGUSR2
INTERRUPT = signal.SIGUSR1


def main(arguments: list[str]) -> NoReturn:
    """Watch until standard input ends, or the parent does."""
    patience_s, grace_s, dump, stacks = float(arguments[0]), float(arguments[1]), arguments[2], int(arguments[3])
    parent = os.getppid()
    tick_s = min(1.0, patience_s / 10)
    while True:
        while _gets_tick(parent, patience_s, tick_s):
            pass
        _write_dump(parent, dump, stacks, patience_s)
        os.kill(parent, INTERRUPT)
        if not _gets_tick(parent, grace_s, tick_s):
            _say(f"the process could not be interrupted and was killed: see {dump}")
            os.kill(parent, signal.SIGKILL)


def _gets_tick(parent: int, patience_s: float, tick_s: float) -> bool:
    """Wait for a byte. False after `patience_s` without one; time in which either process was stopped does not
    count."""
    waited_s = 0.0
    while waited_s < patience_s:
        began = time.monotonic()
        ready, _, _ = select.select([0], [], [], tick_s)
        if os.getppid() != parent or (ready and not os.read(0, 4096)):
            sys.exit(0)
        if ready:
            return True
        if not _is_stopped(parent):
            waited_s += min(time.monotonic() - began, 2 * tick_s)
    return False


def _write_dump(parent: int, dump: str, stacks: int, patience_s: float) -> None:
    os.kill(parent, STACKS)
    time.sleep(0.5)
    os.lseek(stacks, 0, os.SEEK_SET)
    text = os.read(stacks, 1 << 20).decode(errors="replace")
    _say(f"no thread of the process ran for {patience_s:.0f} s: some code never releases the interpreter; see {dump}")
    try:
        os.makedirs(os.path.dirname(dump), exist_ok=True)
        with open(dump, "a", encoding="utf-8") as file:
            file.write(f"==== no thread ran for {patience_s:.0f} s, innermost frame first:\n{text}\n")
    except OSError as error:
        _say(f"{dump} cannot be written: {error.strerror}")


def _is_stopped(pid: int) -> bool:
    """Whether a signal, a debugger or a frozen container stopped the process. False where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _say(text: str) -> None:
    os.write(2, f"RunStalled: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
