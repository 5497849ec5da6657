"""Runs one command in its own process group and ends the group when the supervisor ends.

Started as a plain file with `python -I -S orphan_guard.py GRACE_S COMMAND...`. The supervisor holds the other end of
standard input: when it closes that end, or dies by any means including kill -9, the command's whole group gets SIGTERM,
and SIGKILL after GRACE_S seconds. Imports nothing of agentrl, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code (128 + signal when a signal ended it)."""
    grace_s, command = float(arguments[0]), arguments[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: _signal_group(process.pid, signal.SIGTERM))
    threading.Thread(target=_stop_at_end_of_input, args=(process, grace_s), daemon=True).start()
    code = process.wait()
    # Grandchildren that ignored SIGTERM, or outlived a crashed parent.
    _signal_group(process.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _stop_at_end_of_input(process: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
