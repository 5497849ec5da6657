"""Output of a container is untrusted: only well-formed frames of the other end count, and no bytes do harm."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.backends import muxing
from sandbox.backends.base import Exit
from sandbox.backends.contained import ContainedChild

KEY = b"k" * muxing.KEY_BYTES
HELLO = {"event": "hello", "version": muxing.PROTOCOL_VERSION}


def ends(key: bytes = KEY) -> tuple[muxing.Framer, muxing.Parser]:
    framer, parser = muxing.Framer(), muxing.Parser()
    framer.use_key(key)
    parser.use_key(KEY)
    return framer, parser


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 50))
def test_frames_survive_any_cutting(payloads: list[bytes], step: int) -> None:
    framer, parser = ends()
    wire = b"".join(framer.frames(muxing.STDOUT, payload) for payload in payloads)
    pieces = [wire[start : start + step] for start in range(0, len(wire), step)]
    found = [frame for piece in pieces for frame in parser.feed(piece)]
    assert found == [(muxing.STDOUT, payload) for payload in payloads if payload]


def test_a_long_payload_comes_in_bounded_frames() -> None:
    framer, parser = ends()
    found = list(parser.feed(framer.frames(muxing.CONTROL, b"x" * 200_000)))
    assert b"".join(payload for _, payload in found) == b"x" * 200_000
    assert max(len(payload) for _, payload in found) == muxing.MAX_PAYLOAD_BYTES


def tampered() -> Iterable[Any]:
    framer = ends()[0]
    first, second = framer.frames(muxing.EVENT, b"one"), framer.frames(muxing.EVENT, b"two")
    yield pytest.param(first + first, id="sent_again")
    yield pytest.param(second, id="out_of_order")
    yield pytest.param(first[:-1] + b"!", id="altered")
    yield pytest.param(muxing.STDOUT + first[1:], id="other_channel")
    yield pytest.param(ends(b"another")[0].frames(muxing.EVENT, b"one"), id="wrong_key")
    yield pytest.param(muxing.Framer().frames(muxing.EVENT, b"y" * 40) * 2, id="no_key")
    yield pytest.param(b"c\xff\xff\xff\xff", id="endless_length")


@pytest.mark.parametrize("wire", list(tampered()))
def test_what_is_slipped_in_ends_the_stream(wire: bytes) -> None:
    with pytest.raises(muxing.BrokenStream):
        list(ends()[1].feed(wire))


async def ending(said: bytes) -> Exit:
    """How a child ends if its container sends these bytes over the engine's connection and closes it."""
    ours, theirs = socket.socketpair()
    child = ContainedChild(cast(Any, None), *await asyncio.open_connection(sock=ours))
    reader, writer = await asyncio.open_connection(sock=theirs)
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(5):
        end = await child.exited
        await reader.read()  # what it answered, until it hung up as well
    writer.close()
    return end


def engine(data: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@given(st.binary(max_size=100) | st.binary(max_size=100).map(engine))
async def test_garbage_ends_the_child_and_no_more(said: bytes) -> None:
    assert (await ending(said)).exit_code is None


@pytest.mark.parametrize(
    "event",
    [
        '{"event": "exit", "exit_code": 0, "cpu_s": NaN, "peak_rss_bytes": 1, "is_oom": false}',
        '{"event": "exit", "exit_code": 1e999, "cpu_s": 0, "peak_rss_bytes": 1, "is_oom": false}',
        '{"event": "exit", "exit_code": 0, "cpu_s": 0, "peak_rss_bytes": 1e999, "is_oom": false}',
        '{"event": "settled"}',
        '{"event": ["exit"]}',
        "[" * 60_000,
        "[]",
        "\udcff",
    ],
    ids=["nan", "huge_code", "huge_size", "no_fields", "list", "nested", "no_event", "no_text"],
)
async def test_an_event_that_is_none_ends_the_child(event: str) -> None:
    frames = muxing.Framer().frames(muxing.EVENT, json.dumps(HELLO).encode())
    frames += muxing.Framer().frames(muxing.EVENT, event.encode("utf-8", "surrogateescape"))
    assert await ending(engine(frames)) == Exit(exit_code=None, cpu_s=0.0, peak_rss_bytes=0, is_oom=False)
