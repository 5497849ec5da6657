"""Controls one interpreter from outside: sends it a request, keeps the time, caps its output, decides the status.

Everything read from the interpreter is untrusted. Independent of sessions, slots and HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from sandbox.backends.base import Backend, BackendError, Child, Exit, Stream, Usage
from sandbox.protocol import ExecResult, ExecStatus, Limits
from sandbox.worker import OUTPUT_HARD_CAP_BYTES

log = logging.getLogger(__name__)

READY_DEADLINE_S = 15.0
INTERRUPT_GRACE_S = 0.5
DEATH_DEADLINE_S = 5.0
WATCH_INTERVAL_S = 0.05
_SMALL_FRAME_BYTES = 65_536
_AFTER_TOKEN_BYTES = 8  # the token is the last thing in a reply
_MAX_CHATTER_BYTES = 1024**2  # per call, on the worker's control line, in addition to its one frame


class Frame(msgspec.Struct):
    """The fields of a worker's frame that are read. Typed, so that other content of a hostile frame is never built.

    16 MB of empty lists, decoded without a type, would block the service for seconds and take half a gigabyte.
    """

    token: str = ""
    ready: bool = False
    failed: str = ""
    ok: bool = False
    result: str | None = None
    traceback: str | None = None
    exit_code: int | None = None


# Not the default threads: hostile programs can slow down what uses those, file transfers and the ends of sessions.
_WATCHDOGS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="sandbox-watchdog")

_decode = msgspec.json.Decoder(Frame).decode


class _Capture:
    """One output stream: keeps the head and the tail of the data, within a cap."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = max(self._cap - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(len(self._tail) - self._cap // 2, 0)]

    @property
    def truncated(self) -> bool:
        return self.num_bytes > self._cap

    def text(self) -> str:
        """The text, at most the cap; a marker in the middle gives the total size."""
        if not self.truncated:
            return self._head.decode("utf-8", "replace")
        marker = f"\n... [{self.num_bytes} bytes in all, the middle is cut] ...\n".encode()
        half = (self._cap - len(marker)) // 2
        if half <= 0:
            return self._head[: self._cap].decode("utf-8", "ignore")
        data = self._head[:half] + marker + (self._head + self._tail)[-half:]
        return data.decode("utf-8", "ignore")


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request in progress."""

    token: str
    stdout: _Capture
    stderr: _Capture
    max_frame_bytes: int
    done: asyncio.Future[Frame | None]  # the worker's frame; None if it ended or must be stopped
    num_control_bytes: int = 0
    is_flooding: bool = False
    is_over_limit: bool = False


class Interpreter:
    """A child process and the state of its current call. There is one call at a time."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._call: _Call | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._usage = Usage(
            cpu_s=0.0, peak_rss_bytes=0
        )  # at the end of its last call; the child is stopped between calls
        self._closed = False
        self._killed = False
        child.listen(self)
        child.exited.add_done_callback(self._on_exit)

    @classmethod
    async def start(cls, backend: Backend) -> Interpreter:
        """Start an interpreter and wait until it is ready. Raises BackendError."""
        self = cls(await backend.spawn())
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                await self._ready
        except TimeoutError:
            await self.close()
            raise BackendError("a session was not ready in time") from None
        except BaseException:
            await asyncio.shield(self.close())
            raise
        self._usage = self._child.usage()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter can take another call."""
        return not (self._closed or self._killed or self._child.exited.done())

    async def restrict(self, limits: Limits) -> None:
        """Lower its limits before it has run anything. Raises BackendError."""
        try:
            await self._child.restrict(limits)
        except OSError as error:
            raise BackendError(f"the limits of a session could not be set: {error}") from error

    async def close(self) -> None:
        """Kill the interpreter and free what it held. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        await self._child.close()

    # -- reading ------------------------------------------------------------------------------------------------

    def on_output(self, stream: Stream, data: bytes) -> None:
        """See base.Listener."""
        if (call := self._call) is None:
            return
        capture = call.stdout if stream == "stdout" else call.stderr
        capture.add(data)
        if capture.num_bytes > OUTPUT_HARD_CAP_BYTES and not call.is_flooding:
            call.is_flooding = True
            self._finish(None)

    def on_control(self, data: bytes) -> None:
        """See base.Listener."""
        if not data:
            if self._ready.done():  # without its control line it cannot be used
                self._kill()
            return
        if not self._ready.done():
            self._look_for_ready(data)
        elif self._call is not None and self._is_bearable(self._call, len(data)):
            self._look_for_reply(self._call, data)

    def _look_for_ready(self, data: bytes) -> None:
        *lines, rest = (bytes(self._buffer) + data).split(b"\n")
        self._buffer[:] = rest
        for frame in filter(None, map(_frame, lines)):
            if frame.failed:
                self._ready.set_exception(BackendError(f"a session could not be set up: {frame.failed}"))
                return
            if frame.ready:
                self._ready.set_result(None)
                return

    def _look_for_reply(self, call: _Call, data: bytes) -> None:
        """Find the line with the token, and skip cheaply whatever else the program may have written."""
        token = call.token.encode()
        begin = max(len(self._buffer) - len(token) - _AFTER_TOKEN_BYTES, 0)
        self._buffer += data
        while (at := self._buffer.find(token, begin)) >= 0 and (end := self._buffer.find(b"\n", at)) >= 0:
            start, begin = self._buffer.rfind(b"\n", 0, at) + 1, 0
            frame = _frame(bytes(self._buffer[start:end])) if end - start <= call.max_frame_bytes else None
            del self._buffer[: end + 1]
            if frame is not None and frame.token == call.token:
                self._finish(frame)
        del self._buffer[: self._buffer.rfind(b"\n", begin) + 1]
        if len(self._buffer) > call.max_frame_bytes:
            self._buffer.clear()

    def _is_bearable(self, call: _Call, num_bytes: int) -> bool:
        """Count control bytes. False, which ends the interpreter, after far more bytes than a reply needs."""
        call.num_control_bytes += num_bytes
        if call.num_control_bytes <= call.max_frame_bytes + _MAX_CHATTER_BYTES:
            return True
        call.is_flooding = True
        self._kill()
        return False

    def _on_exit(self, exited: asyncio.Future[Exit]) -> None:
        if not self._ready.done():
            self._ready.set_exception(BackendError(f"a session ended at once: {exited.result()}"))
            self._ready.exception()  # marks it as retrieved: possibly no caller waits any more
        self._finish(None)

    def _finish(self, frame: Frame | None) -> None:
        if self._call is not None and not self._call.done.done():
            self._call.done.set_result(frame)

    # -- calls --------------------------------------------------------------------------------------------------

    async def execute(
        self, code: str, *, timeout_s: float, max_output_bytes: int, stdin: str | None, seed: int | None
    ) -> ExecResult:
        """Run `code`; `seed` only on the first call. No behaviour of the program raises an exception here."""
        request = {"op": "exec", "code": code, "stdin": stdin, "seed": seed, "max_output_bytes": max_output_bytes}
        frame_bytes = 8 * max_output_bytes + _SMALL_FRAME_BYTES  # result and traceback, escaped
        before = self._usage
        began = time.monotonic()
        frame, call, status = await self._request(request, timeout_s, max_output_bytes, frame_bytes)
        wall_s = time.monotonic() - began
        return self._result(frame, call, status, wall_s, before, max_output_bytes)

    async def transfer(self, request: dict[str, Any], *, timeout_s: float, max_frame_bytes: int) -> Frame:
        """Send or fetch a file; returns the worker's (untrusted) answer. Raises BackendError when there is none."""
        frame, _, _ = await self._request(request, timeout_s, 0, max_frame_bytes)
        if frame is None:
            raise BackendError("the interpreter ended during a file transfer")
        return frame

    async def _request(
        self, request: dict[str, Any], timeout_s: float, cap: int, max_frame_bytes: int
    ) -> tuple[Frame | None, _Call, ExecStatus | None]:
        """Send a request. Returns the frame, and the reason if the call was stopped."""
        call = _Call(
            token=secrets.token_hex(16),
            stdout=_Capture(cap),
            stderr=_Capture(cap),
            max_frame_bytes=max_frame_bytes,
            done=asyncio.get_running_loop().create_future(),
        )
        self._buffer.clear()
        self._call = call
        if not self.is_alive:
            self._finish(None)
        status: ExecStatus | None = None
        watch = asyncio.create_task(self._watch(call)) if self._child.is_watched else None
        try:
            self._child.signal(signal.SIGCONT)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._send({**request, "token": call.token})
                    frame = await asyncio.shield(call.done)
            except TimeoutError:
                status, frame = "timeout", None
            if call.is_flooding and status is None:
                status = "output_limit"
            if status is not None and not call.is_over_limit:
                await self._interrupt(call)
            await self._settle(call)
            return frame, call, status
        except BaseException:  # cancelled: the caller no longer waits
            self._kill()
            raise
        finally:
            self._call = None
            if watch is not None:
                watch.cancel()

    async def _send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it ended; its exit gives the reason
            await self._child.send(json.dumps(request).encode() + b"\n")

    async def _interrupt(self, call: _Call) -> None:
        """Stop the call: SIGINT first, which keeps the state of most programs, then SIGKILL."""
        call.done = asyncio.get_running_loop().create_future()
        if not self._child.exited.done():
            self._child.signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_GRACE_S):
                    if await asyncio.shield(call.done) is not None:
                        return
        self._kill()

    def _kill(self) -> None:
        self._killed = True  # set at once, because its exit is noticed later and no call may be sent until then
        self._child.signal(signal.SIGKILL)

    async def _settle(self, call: _Call) -> None:
        """Stop everything in the session after a call, so that nothing runs between calls."""
        if call.done.done() and call.done.result() is not None and await self._child.settle():
            return
        self._kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_DEADLINE_S):
                await asyncio.shield(self._child.exited)
        await self._child.settle()  # reads its last output

    async def _watch(self, call: _Call) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await asyncio.get_running_loop().run_in_executor(_WATCHDOGS, _is_over_limit, self._child):
                call.is_over_limit = True
                self._kill()
                return

    # -- results ------------------------------------------------------------------------------------------------

    def _result(
        self,
        frame: Frame | None,
        call: _Call,
        status: ExecStatus | None,
        wall_s: float,
        before: Usage,
        cap: int,
    ) -> ExecResult:
        exited = self._child.exited.result() if self._child.exited.done() else None
        failed = exited is not None and exited.is_failure
        if call.is_over_limit or (exited is not None and exited.is_oom):
            status = "oom"
        elif failed:
            status = "sandbox_error"
        elif status is None:
            status = "crashed" if frame is None else "ok" if frame.ok else "error"
        if exited is not None:
            after = Usage(cpu_s=exited.cpu_s, peak_rss_bytes=max(exited.peak_rss_bytes, before.peak_rss_bytes))
        else:
            self._usage = after = self._child.usage()
        exit_code = exited.exit_code if exited is not None else frame.exit_code if frame is not None else None
        return ExecResult(
            status=status,
            stdout=call.stdout.text(),
            stderr="the process that the session was forked from ended" if failed else call.stderr.text(),
            result=_text(frame.result, cap) if frame and status == "ok" else None,
            traceback=_text(frame.traceback, cap) if frame and status == "error" else None,
            truncated=call.stdout.truncated or call.stderr.truncated or bool(frame and _is_cut(frame, cap)),
            exit_code=exit_code if exit_code is not None and abs(exit_code) < 2**31 else None,
            wall_s=wall_s,
            cpu_s=max(after.cpu_s - before.cpu_s, 0.0),
            peak_rss_bytes=after.peak_rss_bytes,
        )


def _is_over_limit(child: Child) -> bool:
    """Whether the session uses too much. One that cannot be measured does."""
    try:
        return child.is_over_limit()
    except OSError:
        log.exception("a session that could not be measured was ended")
        return True


def _frame(line: bytes) -> Frame | None:
    """Decode a line, or None: the worker may not have written JSON."""
    try:
        return _decode(line)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _is_cut(frame: Frame, cap: int) -> bool:
    """Whether the worker cut a text: it then exceeds the cap by the note that says how much."""
    return any(text is not None and len(text) > cap for text in (frame.result, frame.traceback))


def _text(text: str | None, cap: int) -> str | None:
    """A text of the worker's, bounded here too, because hostile code may have changed the worker's cap."""
    return None if text is None else text[: cap + 100]
