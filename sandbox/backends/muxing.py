"""Several streams over one: how the service and the process in a container talk through the container's stdio.

A frame is a channel (one byte), a length (four, big-endian) and that many bytes. Knows nothing of what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

PROTOCOL_VERSION = 1
"""Of the frames and the orders in them: an image of another version is refused."""

CONTROL, STDOUT, STDERR, EVENT = b"c", b"o", b"e", b"x"
"""Frames of worker.py; what the program printed; JSON orders to, and events from, the process in the container."""

MAX_PAYLOAD_BYTES = 65_536
_HEADER = struct.Struct(">cI")


class BrokenStream(ValueError):
    """Bytes that are no frames."""


def frames(channel: bytes, data: bytes) -> bytes:
    """`data` as frames, none above the largest allowed."""
    pieces = (data[start : start + MAX_PAYLOAD_BYTES] for start in range(0, len(data), MAX_PAYLOAD_BYTES))
    return b"".join(_HEADER.pack(channel, len(piece)) + piece for piece in pieces)


class Parser:
    """Bytes in as they come, frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """(channel, payload) of every frame that is now complete. Raises BrokenStream."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            channel, length = _HEADER.unpack_from(self._buffer)
            if channel not in (CONTROL, STDOUT, STDERR, EVENT) or length > MAX_PAYLOAD_BYTES:
                raise BrokenStream(f"no frame begins with {bytes(self._buffer[: _HEADER.size])!r}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield channel, payload
