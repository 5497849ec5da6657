"""HTTP connections of clients that may be hostile or slow: bounded in number, header size and time.

A client that sends its request a byte at a time, or does not read its answer, holds a connection, a descriptor and the
memory of a body. uvicorn bounds none of these, so this refines its protocol. Independent of the requests' meaning.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one client, and all together, may hold.

    >>> ConnectionLimits(max_connections=100).header_s
    20.0
    """

    max_connections: int = 4096
    max_header_bytes: int = 64 * 1024  # request line and headers
    header_s: float = 20.0  # from the first byte, or the connection, to the end of the headers
    idle_s: float = 60.0  # without a byte of a body that is awaited, or with an answer that is not read
    body_s: float = 600.0  # for a whole body


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed when it holds too much, or takes too long.

    Example: `uvicorn.Config(app, http=bounded(ConnectionLimits(max_connections=100)))`.
    """

    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._has_ended = False  # a request, in the bytes that are parsed now
        self._body_ends_s = 0.0
        self._reading: asyncio.TimerHandle | None = None  # until the next bytes of a request must have come
        self._writing: asyncio.TimerHandle | None = None  # until the client must have read some of the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse one connection too many, else wait for its first headers."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, f"{self.limits.max_connections} connections are open")
        else:
            self._await_bytes(self.limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._stop(self._reading)
        self._stop(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and set the deadline for what must come next."""
        if self.transport.is_closing():
            return
        if self._is_in_headers and self._num_header_bytes == 0:
            self._await_bytes(self.limits.header_s)
        self._has_ended = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_in_headers:
            self._await_body()
        elif not self._has_ended:
            self._num_header_bytes += len(data)
            self._check_header_size()

    def on_headers_complete(self) -> None:
        """Start the request, unless its headers are too large."""
        self._stop(self._reading)
        self._is_in_headers, self._reading = False, None
        self._num_header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._check_header_size()
        if not self.transport.is_closing():
            self._body_ends_s = self.loop.time() + self.limits.body_s
            self._await_body()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless the request was refused."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here: from now on only the answer has a deadline."""
        self._stop(self._reading)
        self._is_in_headers, self._has_ended, self._num_header_bytes, self._reading = True, True, 0, None
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read: give it some time."""
        super().pause_writing()
        self._stop(self._writing)
        self._writing = self.loop.call_later(self.limits.idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop(self._writing)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a request, also when its client has not read the last answer."""
        super().timeout_keep_alive_handler()
        self._stop(self._writing)
        self._writing = self.loop.call_later(self.limits.idle_s, self.transport.abort)

    def _await_bytes(self, deadline_s: float) -> None:
        self._stop(self._reading)
        self._reading = self.loop.call_later(deadline_s, self._refuse, 408, "the request did not come in time")

    def _await_body(self) -> None:
        self._await_bytes(min(self.limits.idle_s, self._body_ends_s - self.loop.time()))

    def _check_header_size(self) -> None:
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse(431, f"at most {self.limits.max_header_bytes} bytes of headers")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where no answer has begun, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            head = STATUS_LINE[status] + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(head + f"content-length: {len(message)}\r\n\r\n{message}".encode())
        self.transport.close()
        self._stop(self._writing)
        self._writing = self.loop.call_later(self.limits.idle_s, self.transport.abort)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """The protocol class with other limits, for uvicorn.Config."""

    class Connection(BoundedConnection):
        """See BoundedConnection."""

    Connection.limits = limits
    return Connection
