"""A helper program that answers JSON lines: many requests at a time over one pipe. Independent of their content.

    stdin   {"id": 7, "ask": NAME, ...}         {"cancel": 7}
    stdout  {"id": 7, "answer": ...}  or  {"id": 7, "error": TEXT}

Its process group ends when the program ends, when its input closes, and when this process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from agentrl.errors import EnvError

MAX_LINE_BYTES = 2**30
MAX_STDERR_BYTES = 4096
GRACE_S = 5.0
# Linux sends the signal when the thread that started the process ends, for any reason.
DIES_WITH_US = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def dying_with_us(command: Sequence[str]) -> list[str]:
    """A command that the kernel ends when this process is killed."""
    return [sys.executable, "-I", "-S", "-c", DIES_WITH_US, *command]


class LineProcess:
    """A running helper program. `open` starts it; `close` always ends it."""

    def __init__(self, name: str, process: Process, errors: Any) -> None:
        self._name = name
        self._process = process
        self._errors = errors
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"answers of {name}")

    @classmethod
    async def open(cls, name: str, command: Sequence[str], *, env: Mapping[str, str]) -> LineProcess:
        """Start the program with `env` added to this process's variables. Raises EnvError when it cannot start."""
        errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed with the process)
        try:
            process = await asyncio.create_subprocess_exec(
                *dying_with_us(command),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env={**os.environ, **env},
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            errors.close()
            raise EnvError(f"{name} cannot be started: {error}") from error
        return cls(name, process, errors)

    @property
    def is_open(self) -> bool:
        """Whether the program still answers."""
        return not self._reader.done()

    async def ask(self, what: str, **details: Any) -> Any:
        """Send a request and return the answer. Cancelling it cancels it in the program too. Raises EnvError."""
        if not self.is_open:
            raise self._ended(what)
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, "ask": what, **details})
            return await self._waiting[number]
        except asyncio.CancelledError:
            with suppress(EnvError):
                await self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """Close its input, then end the whole process group. May be called again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait({self._reader}, timeout=GRACE_S)
        self._errors.close()

    async def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise self._ended(str(line.get("ask"))) from error

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                said = json.loads(line)
                future = self._waiting.get(said["id"])
                if future is None or future.done():
                    continue
                if "error" in said:
                    future.set_exception(EnvError(f"{self._name}: {said['error']}"))
                else:
                    future.set_result(said["answer"])
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._ended("a question"))

    def _ended(self, what: str) -> EnvError:
        said = ""
        if not self._errors.closed:
            size = os.fstat(self._errors.fileno()).st_size
            start = max(0, size - MAX_STDERR_BYTES)
            said = os.pread(self._errors.fileno(), MAX_STDERR_BYTES, start).decode(errors="replace").strip()
        quoted = f"; the end of its standard error:\n{said}" if said else ""
        return EnvError(f"{self._name} ended before it answered {what!r}{quoted}")
