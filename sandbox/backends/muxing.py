"""Several streams over one: the protocol between the service and a container's pid 1, over the container's stdio.

A frame is a channel (one byte), a length (four, big-endian), a tag once there is a key, and that many bytes. The tag is
needed because a program in the container may reach the descriptors: gVisor lets it open those of pid 1. It has no key,
so data that it inserts ends the stream and has no other effect. Independent of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

PROTOCOL_VERSION = 2
"""Version of the frames and of the orders in them. An image with another version is refused."""

CONTROL, STDOUT, STDERR, EVENT = b"c", b"o", b"e", b"x"
"""Channels: frames of worker.py; the program's output; JSON orders to pid 1, and events from it."""

MAX_PAYLOAD_BYTES = 65_536
KEY_BYTES = 32
_HEADER = struct.Struct(">cI")
_NUMBER = struct.Struct(">Q")
_TAG_BYTES = 16


class BrokenStream(ValueError):
    """The bytes are not frames, or not from the other end."""


class _Sealed:
    """One direction. A tag covers its frame and the frame's position, so that no frame can be replayed."""

    def __init__(self) -> None:
        self._key, self._number, self._tag_bytes = b"", 0, 0

    def use_key(self, key: bytes) -> None:
        """Use a key from the next frame on. Until then frames have no tag."""
        self._key, self._tag_bytes = key, _TAG_BYTES

    def _next_tag(self, header: bytes, payload: bytes) -> bytes:
        if not self._key:
            return b""
        self._number += 1
        tag = hashlib.blake2b(_NUMBER.pack(self._number) + header, key=self._key, digest_size=_TAG_BYTES)
        tag.update(payload)
        return tag.digest()


class Framer(_Sealed):
    """Turns bytes into frames."""

    def frames(self, channel: bytes, data: bytes) -> bytes:
        """`data` as frames, none larger than allowed."""
        framed = []
        for start in range(0, len(data), MAX_PAYLOAD_BYTES):
            piece = data[start : start + MAX_PAYLOAD_BYTES]
            header = _HEADER.pack(channel, len(piece))
            framed += [header, self._next_tag(header, piece), piece]
        return b"".join(framed)


class Parser(_Sealed):
    """Turns received bytes into frames."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (channel, payload) of every frame that is now complete. Raises BrokenStream."""
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
                raise BrokenStream("a frame does not carry the other end's tag")
            del self._buffer[: start + length]
            yield channel, payload
