"""Several streams over one: how the service and the process in a container talk through the container's stdio.

A frame is a channel (one byte), a length (four, big-endian), a tag once there is a key, and that many bytes. The tag is
there because a program in the container may get at the descriptors: gVisor lets it open those of pid 1. It has no key,
so what it slips in ends the stream and changes nothing else. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

PROTOCOL_VERSION = 2
"""Of the frames and the orders in them: an image of another version is refused."""

CONTROL, STDOUT, STDERR, EVENT = b"c", b"o", b"e", b"x"
"""Frames of worker.py; what the program printed; JSON orders to, and events from, the process in the container."""

MAX_PAYLOAD_BYTES = 65_536
KEY_BYTES = 32
_HEADER = struct.Struct(">cI")
_NUMBER = struct.Struct(">Q")
_TAG_BYTES = 16


class BrokenStream(ValueError):
    """Bytes that are no frames, or not the other end's."""


class _Sealed:
    """One direction. A tag covers its frame and the frame's place in the stream, so that none can be sent again."""

    def __init__(self) -> None:
        self._key, self._number, self._tag_bytes = b"", 0, 0

    def use_key(self, key: bytes) -> None:
        """From the next frame on; until then frames have no tag."""
        self._key, self._tag_bytes = key, _TAG_BYTES

    def _next_tag(self, header: bytes, payload: bytes) -> bytes:
        if not self._key:
            return b""
        self._number += 1
        tag = hashlib.blake2b(_NUMBER.pack(self._number) + header, key=self._key, digest_size=_TAG_BYTES)
        tag.update(payload)
        return tag.digest()


class Framer(_Sealed):
    """Bytes in, frames out."""

    def frames(self, channel: bytes, data: bytes) -> bytes:
        """`data` as frames, none above the largest allowed."""
        framed = []
        for start in range(0, len(data), MAX_PAYLOAD_BYTES):
            piece = data[start : start + MAX_PAYLOAD_BYTES]
            header = _HEADER.pack(channel, len(piece))
            framed += [header, self._next_tag(header, piece), piece]
        return b"".join(framed)


class Parser(_Sealed):
    """Bytes in as they come, frames out."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """(channel, payload) of every frame that is now complete. Raises BrokenStream."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            header = bytes(self._buffer[: _HEADER.size])
            channel, length = _HEADER.unpack(header)
            if channel not in (CONTROL, STDOUT, STDERR, EVENT) or length > MAX_PAYLOAD_BYTES:
                raise BrokenStream(f"no frame begins with {header!r}")
            start = _HEADER.size + self._tag_bytes
            if len(self._buffer) < start + length:
                return
            tag, payload = bytes(self._buffer[_HEADER.size : start]), bytes(self._buffer[start : start + length])
            if not hmac.compare_digest(tag, self._next_tag(header, payload)):
                raise BrokenStream("a frame does not bear the other end's tag")
            del self._buffer[: start + length]
            yield channel, payload
