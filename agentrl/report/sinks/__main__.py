"""The process of one metrics sink: `python -m agentrl.report.sinks NAME RUN FD`. `isolated.py` starts it.

Takes ("write" | "rewind", *arguments) from the connection FD and answers each with None, or with what went wrong. When
the other end is closed, or its process died, the sink is closed and the process ends, with its group if it hangs.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.report.sinks import base
from agentrl.run_folder import RunFolder

CLOSE_TIMEOUT_S = 60.0  # after which nobody waits


def main(name: str, run: str, fd: str) -> None:
    """Serve until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run closes its sinks
    connection: Connection[Any, Any] = Connection(int(fd))
    requests: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    try:
        sink = base.make(name, RunFolder(path=Path(run)))
    except BaseException as error:
        _send(connection, _text(error))
        raise
    _send(connection, None)
    while (request := requests.get()) is not None:
        _send(connection, _answer(sink, request))
    sink.close()


def _receive(connection: Connection[Any, Any], requests: queue.Queue[tuple[Any, ...] | None]) -> None:
    """In a thread of its own, so that the end is noticed while the library hangs."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        requests.put(None)
        end = threading.Timer(CLOSE_TIMEOUT_S, os.killpg, (os.getpgrp(), signal.SIGKILL))
        end.daemon = True
        end.start()


def _send(connection: Connection[Any, Any], answer: str | None) -> None:
    """Answer the run. Where it has died, the sink still gets and writes what was sent."""
    with suppress(OSError):
        connection.send(answer)


def _answer(sink: base.MetricsSink, request: tuple[Any, ...]) -> str | None:
    method, *arguments = request
    try:
        getattr(sink, method)(*arguments)
    except Exception as error:
        return _text(error)
    return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main(*sys.argv[1:])
