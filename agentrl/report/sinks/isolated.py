"""Keeps a metrics sink away from the run: a bounded queue, a thread, and the library in a process of its own.

The run only puts lines into the queue. The thread hands them to the process (`__main__.py`) one by one; each answer
has a deadline, after which the process is ended. A failed line is tried again later, then the sink is given up.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.report.sinks.base import SINKS, MetricsSink, make
from agentrl.run_folder import RunFolder
from agentrl.supervision.child import module_command

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # lines
START_TIMEOUT_S = 180.0  # imports, a first connection; the first start of MLflow makes a database
CALL_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
RETRY_AFTER_S = (1.0, 5.0, 15.0, 60.0)  # between the attempts of one line; after the last one the sink is given up
CONTINUES = "The run continues, and metrics.jsonl has every line"

Request = tuple[Any, ...]


class SinkFailed(Exception):
    """The sink raised, hung or died. Stays inside this module."""


class SinkProcess:
    """The process of one sink.

    Example:
        process = SinkProcess("wandb", run_folder)
        process.ask(("write", 3, 1.7e9, {"learner/kl": 0.01}))
    """

    def __init__(self, name: str, run: RunFolder) -> None:
        self._name = name
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_over = False

    @property
    def log_path(self) -> Path:
        """What the library prints."""
        return self._run.logs / f"{self._name}.log"

    def ask(self, request: Request) -> None:
        """Have a request done. Raises SinkFailed; the next request starts a new process where this one ended."""
        connection = self.start()
        with suppress(OSError):  # a dead process shows in the answer
            connection.send(request)
        if error := self._answer(connection, CALL_TIMEOUT_S):
            raise SinkFailed(error)

    def start(self) -> Connection[Any, Any]:
        """Start the process where none runs, and have the sink opened. Raises SinkFailed."""
        if self._connection is None:
            self._connection = self._spawn()
            if error := self._answer(self._connection, START_TIMEOUT_S):
                self._end()
                raise SinkFailed(error)
        return self._connection

    def close(self) -> None:
        """Let the sink write what is left, however long it takes: `kill` in another thread ends that."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()

    def kill(self) -> None:
        """End the process and what it started, for good: no request starts another one."""
        self._is_over = True
        self._signal()

    def _signal(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _spawn(self) -> Connection[Any, Any]:
        if self._is_over:
            raise SinkFailed("it was ended")
        ours, theirs = Pipe()
        command = [*module_command("agentrl.report.sinks"), self._name, str(self._run.path), str(theirs.fileno())]
        try:
            with theirs, self.log_path.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SinkFailed(f"its process cannot be started: {error}") from error
        return ours

    def _answer(self, connection: Connection[Any, Any], within_s: float) -> str | None:
        """None, or what went wrong in the sink. Raises SinkFailed, and ends the process, where it hangs or died."""
        try:
            if connection.poll(within_s):
                answer: str | None = connection.recv()
                return answer
            reason = f"no answer within {within_s:g} s"
        except (EOFError, OSError):
            reason = "its process died"
        self._end()
        raise SinkFailed(reason)

    def _end(self) -> None:
        self._signal()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class IsolatedSink:
    """A sink in a process of its own. No method raises, and none but `close` waits, which does for CLOSE_TIMEOUT_S.

    Example:
        sink = IsolatedSink("wandb", run_folder)
        sink.write(3, 1.7e9, {"learner/kl": 0.01})
    """

    def __init__(self, name: str, run: RunFolder) -> None:
        self._num_written = 0  # lines, counted by the run's thread
        self._num_taken = 0  # by the sink, counted by this object's thread
        self._name = name
        self._process = SinkProcess(name, run)
        self._requests: queue.Queue[Request | None] = queue.Queue(MAX_WAITING)
        self._is_closing = threading.Event()
        self._has_failed = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._deliver_all, name=f"metrics sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Queue the values of one moment."""
        self._num_written += 1
        self._put(("write", step, time_s, dict(values)))

    def rewind(self, step: int) -> None:
        """Queue the rewind, behind the lines before it."""
        self._put(("rewind", step))

    def close(self) -> None:
        """Deliver what is queued, and close the sink; end it where that takes longer than CLOSE_TIMEOUT_S."""
        self._is_closing.set()
        with suppress(queue.Full):
            self._requests.put_nowait(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn(f"it did not finish within {CLOSE_TIMEOUT_S:g} s", then="Its process was ended")
            self._process.kill()
            self._thread.join(1.0)
        if lost := self._num_written - self._num_taken:
            log.warning("metrics sink %s lacks %d lines of metrics; metrics.jsonl has all", self._name, lost)

    def _put(self, request: Request) -> None:
        with suppress(queue.Full):  # then the line is lost, and counted
            if not self._is_given_up:
                self._requests.put_nowait(request)

    def _deliver_all(self) -> None:
        with suppress(SinkFailed):  # the first line tries again
            self._process.start()
        while (request := self._requests.get()) is not None:
            if not self._deliver(request):
                self._is_given_up = True
                break
            self._num_taken += request[0] == "write"
            if self._is_closing.is_set() and self._requests.empty():
                break
        self._process.close()

    def _deliver(self, request: Request) -> bool:
        """Whether the sink took it, at the first or at a later attempt. Closing ends the attempts."""
        then = f"It gets {len(RETRY_AFTER_S)} more attempts, then is given up until a resume"
        for retry_after_s in (*RETRY_AFTER_S, None):
            try:
                self._process.ask(request)
            except SinkFailed as error:
                self._warn(str(error), then=then)
                if retry_after_s is None or self._is_closing.wait(retry_after_s):
                    return False
            else:
                return True
        return False

    def _warn(self, reason: str, *, then: str) -> None:
        if not self._has_failed:
            text = "metrics sink %s: %s. %s. %s. Its output: %s. To do without it: metrics.sinks=[tensorboard]"
            log.warning(text, self._name, reason, CONTINUES, then, self._process.log_path)
        self._has_failed = True


class GuardedSink:
    """A sink in this process, for a library that only writes files. Its errors are warned about once.

    Example:
        sink = GuardedSink("tensorboard", run_folder)
    """

    def __init__(self, name: str, run: RunFolder) -> None:
        self._name = name
        self._run = run
        self._sink: MetricsSink | None = None
        self._has_failed = False

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Pass the values on."""
        self._guarded(lambda sink: sink.write(step, time_s, values))

    def rewind(self, step: int) -> None:
        """Pass the rewind on."""
        self._guarded(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Close the sink if it was used."""
        if self._sink is not None:
            self._guarded(lambda sink: sink.close())

    def _guarded(self, call: Callable[[MetricsSink], None]) -> None:
        try:
            self._sink = self._sink or make(self._name, self._run)
            call(self._sink)
        except Exception as error:
            if not self._has_failed:
                log.warning("metrics sink %s: %s: %s. %s", self._name, type(error).__name__, error, CONTINUES)
            self._has_failed = True


def opened(name: str, run: RunFolder) -> MetricsSink:
    """The sink of that name, kept away from the run: no method raises."""
    return IsolatedSink(name, run) if SINKS[name].is_isolated else GuardedSink(name, run)
