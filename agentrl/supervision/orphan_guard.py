"""Runs one command in its own process group and never outlives, nor lets it outlive, whoever holds our standard input.

Started as a plain file with `python -I -S guard.py GRACE_S COMMAND...`: when standard input reaches its end (the
supervisor closed it, or died by any means, kill -9 included) the command's whole group gets SIGTERM, and SIGKILL after
GRACE_S seconds. Knows nothing of agentrl, so that it starts in milliseconds.
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
    # Grandchildren that ignored the polite signal, or outlived a crashed parent.
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
