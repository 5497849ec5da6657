"""Worker processes that ask math-verify whether two answers are equal, and that can be killed at any moment.

math-verify limits its own time with SIGALRM, which fails outside the main thread and cannot stop C code. Here the
kernel limits it: each question gets CPU_LIMIT_S of processor time (SIGXCPU) and the memory limit of its process. An
answer that needs more is not equal to any gold answer. A worker that hangs, or dies without having used its time, is a
failure of the grader and raises EnvError. Independent of episodes.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from agentrl.errors import EnvError, MissingDependencyError

CPU_LIMIT_S = 3
WALL_LIMIT_S = 60.0
"""Far beyond the CPU limit. Only a hang, or a machine without a free processor, reaches it."""
START_LIMIT_S = 90.0
MEMORY_BYTES = 2 * 1024**3
MAX_ANSWER_CHARACTERS = 2000
MAX_WORKERS = 2


class EqualityPool:
    """Up to `max_workers` workers, started when needed. Thread-safe.

    Example:
        EqualityPool.shared().equal(r"\\frac{1}{2}", "0.5")  # True
    """

    _shared: EqualityPool | None = None
    _shared_lock = threading.Lock()

    def __init__(self, max_workers: int = MAX_WORKERS, *, wall_limit_s: float = WALL_LIMIT_S) -> None:
        self._wall_limit_s = wall_limit_s
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(max_workers):
            self._idle.put(None)  # a slot without a worker yet

    @classmethod
    def shared(cls) -> EqualityPool:
        """The pool of this process. Its workers end with the process."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
                atexit.register(cls._shared.close)
            return cls._shared

    def equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds them equal. Blocks. Raises EnvError if a worker fails, MissingDependencyError."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return False
        worker = self._idle.get()
        try:
            worker = worker or _Worker()
            return worker.equal(gold, answer, self._wall_limit_s)
        finally:
            self._idle.put(worker if worker is not None and worker.is_alive else None)

    def close(self) -> None:
        """End the workers that are idle."""
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()


class _Worker:
    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            need = "grading answers that are not integers needs math-verify"
            raise MissingDependencyError.of_extra(need, "grading")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envs.equality_worker", str(CPU_LIMIT_S), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[1],
            start_new_session=True,  # Ctrl-C reaches only the owner; the closed pipe ends the worker
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        if self._read(START_LIMIT_S) != {"ready": True}:
            self.kill()
            raise EnvError("grader: the math-verify worker did not start")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def equal(self, gold: str, answer: str, wall_limit_s: float) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.kill()
            raise EnvError(f"grader: the math-verify worker is gone: {error}") from error
        reply = self._read(wall_limit_s)
        if isinstance(reply, dict) and isinstance(reply.get("equal"), bool):
            return bool(reply["equal"])
        if self.kill() == -signal.SIGXCPU:
            return False
        raise EnvError(f"grader: math-verify gave {reply or 'no answer'} for gold {gold!r}, answer {answer!r}")

    def kill(self) -> int:
        """End the worker. Returns the signal or exit code of its death, or SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue
        return code

    def _read(self, limit_s: float) -> Any:
        """Read a reply: one short line, written at once. None when the worker ended or the limit passed."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        if not self._selector.select(deadline - time.monotonic()):
            return None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # the pipe closed because it ended
        return json.loads(line) if line else None
