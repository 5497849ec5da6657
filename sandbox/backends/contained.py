"""One interpreter in a container, controlled over the container's stdio. Independent of executions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import signal
from typing import TYPE_CHECKING, Any

from sandbox.backends import muxing
from sandbox.backends.base import BackendError, Exit, Listener, Stream, Usage
from sandbox.protocol import Limits

if TYPE_CHECKING:
    from docker.models.containers import Container

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 192 * 1024**2
"""Memory for Python and the preloaded libraries, which a session's own limit does not include."""
SETTLE_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 15.0
_READ_BYTES = 65_536
_STREAMS: dict[bytes, Stream] = {muxing.STDOUT: "stdout", muxing.STDERR: "stderr"}
_ENGINE_HEADER_BYTES = 8  # stream type, three zeros, length: the engine's header of each piece of output
_ENGINE_STDOUT = 1


class ContainedChild:
    """See base.Child."""

    is_watched = False  # the container limits it

    def __init__(self, container: Container, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._container, self._reader, self._writer = container, reader, writer
        self._parser, self._framer = muxing.Parser(), muxing.Framer()
        self._complaints = bytearray()  # what pid 1 wrote to stderr
        self._usage = Usage(cpu_s=0.0, peak_rss_bytes=0)
        self._hello: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._settled: asyncio.Future[bool] | None = None
        self._listener: Listener | None = None
        self._early: list[tuple[bytes, bytes]] = []  # frames that arrived before `listen`
        self._pump = asyncio.create_task(self._read(), name="container output")

    async def hello(self) -> None:
        """Wait for pid 1's first frame and answer it. Raises BackendError when it ends or has another version."""
        version = await self._hello
        if version != muxing.PROTOCOL_VERSION:
            raise BackendError(
                f"the image has protocol {version}, this service {muxing.PROTOCOL_VERSION}: build the image again"
            )
        for end in (self._framer, self._parser):
            key = secrets.token_bytes(muxing.KEY_BYTES)
            end.use_key(key)
            self._writer.write(key)

    # -- what it says -------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """See base.Child."""
        self._listener = listener
        early, self._early = self._early, []
        for channel, payload in early:
            self._on_frame(channel, payload)

    async def _read(self) -> None:
        reason = ""
        try:
            while True:
                header = await self._reader.readexactly(_ENGINE_HEADER_BYTES)
                left = int.from_bytes(header[4:], "big")
                while left:
                    data = await self._reader.read(min(left, _READ_BYTES))
                    if not data:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(data)
                    self._on_output(header[0], data)
        except (asyncio.IncompleteReadError, OSError):
            reason = "the container ended"
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            reason = f"the container does not keep to the protocol: {error}"
            log.warning("%s", reason)
        finally:
            self._on_end(reason)

    def _on_output(self, stream: int, data: bytes) -> None:
        if stream != _ENGINE_STDOUT:
            self._complaints = (self._complaints + data)[-4000:]
            return
        for channel, payload in self._parser.feed(data):
            if channel == muxing.EVENT:
                self._on_event(json.loads(payload))
            elif self._listener is None:
                self._early.append((channel, payload))
            else:
                self._on_frame(channel, payload)

    def _on_frame(self, channel: bytes, payload: bytes) -> None:
        assert self._listener is not None
        if channel == muxing.CONTROL:
            self._listener.on_control(payload)
        else:
            self._listener.on_output(_STREAMS[channel], payload)

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "hello" if not self._hello.done():
                self._hello.set_result(event["version"])
            case "settled":
                self._usage = _usage(event)
                if self._settled is not None and not self._settled.done():
                    self._settled.set_result(bool(event["is_clean"]))
            case "exit" if not self.exited.done():
                usage = _usage(event)
                self.exited.set_result(
                    Exit(
                        exit_code=int(event["exit_code"]),
                        cpu_s=usage.cpu_s,
                        peak_rss_bytes=usage.peak_rss_bytes,
                        is_oom=bool(event["is_oom"]),
                    )
                )

    def _on_end(self, reason: str) -> None:
        if not self._hello.done():
            words = self._complaints.decode("utf-8", "replace").strip().rpartition("\n")[2]
            self._hello.set_exception(BackendError(f"{reason or 'stopped'}: {words or 'no reason given'}"))
            self._hello.exception()  # marks it as retrieved: possibly no caller waits
        if not self.exited.done():
            self.exited.set_result(
                Exit(
                    exit_code=None,
                    cpu_s=self._usage.cpu_s,
                    peak_rss_bytes=self._usage.peak_rss_bytes,
                    is_oom=False,
                )
            )
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(True)
        self._writer.close()

    # -- orders -------------------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """See base.Child."""
        if self._writer.is_closing():
            raise ConnectionError("the container ended")
        self._writer.write(self._framer.frames(muxing.CONTROL, data))
        await self._writer.drain()

    def _order(self, **order: object) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._framer.frames(muxing.EVENT, json.dumps(order).encode()))

    def signal(self, signum: int) -> None:
        """See base.Child."""
        if not self.exited.done():
            self._order(op="signal", signum=int(signum))

    async def settle(self) -> bool:
        """See base.Child."""
        if self.exited.done():
            return True
        self._settled = asyncio.get_running_loop().create_future()
        self._order(op="settle")
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                return await self._settled
        except TimeoutError:
            return False

    def usage(self) -> Usage:
        """See base.Child. The value at the end of the last call."""
        return self._usage

    def is_over_limit(self) -> bool:
        """See base.Child. Always False: the engine limits the container."""
        return False

    async def restrict(self, limits: Limits) -> None:
        """See base.Child."""
        self._order(op="restrict", **limits.model_dump())
        await asyncio.to_thread(self._update, limits.memory_bytes + OVERHEAD_BYTES)

    def _update(self, memory_bytes: int) -> None:
        from docker.errors import DockerException

        try:
            self._container.update(mem_limit=memory_bytes, memswap_limit=memory_bytes)
        except DockerException as error:
            raise OSError(str(error)) from error

    async def close(self) -> None:
        """See base.Child."""
        self.signal(signal.SIGKILL)
        removal = asyncio.create_task(asyncio.to_thread(remove, self._container))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.shield(removal)
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump


def _usage(event: dict[str, Any]) -> Usage:
    usage = Usage(cpu_s=float(event["cpu_s"]), peak_rss_bytes=int(event["peak_rss_bytes"]))
    if not math.isfinite(usage.cpu_s):
        raise ValueError(f"{usage.cpu_s} s of processor time")
    return usage


def remove(container: Container) -> None:
    """Kill and delete a container that is not being removed yet. Never raises; a leftover ends with the connection."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        container.remove(force=True)
    except APIError as error:
        if error.status_code not in (404, 409):
            log.warning("a container could not be removed: %s", error)
    except (DockerException, RequestException) as error:
        log.warning("a container could not be removed: %s", error)
