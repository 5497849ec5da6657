"""Clients that hold a connection: by headers that never end, bodies that never come, answers that they never read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from sandbox.connections import ConnectionLimits, bounded

LARGE_BYTES = 64 * 1024**2  # more than the buffers of both ends take
DEADLINE_S = 60.0


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body, or with a large answer."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
        more = message["more_body"]
    body = bytes(LARGE_BYTES) if scope["path"] == "/large" else str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def _serve(**limits: Any) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """A server with these limits: its port, and itself."""
    config = uvicorn.Config(
        _app,
        http=bounded(ConnectionLimits(**limits)),
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=600,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = True
            await task


async def _say(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes the connection. An end with a reset may lose the last words."""
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionResetError):
            while chunk := await reader.read(65_536):
                data += chunk
    return data


UNFINISHED = {
    "nothing": (b"", {"header_s": 0.1}, b" 408 "),
    "half a line": (b"GET / HT", {"header_s": 0.1}, b" 408 "),
    "half of the headers": (b"GET / HTTP/1.1\r\nhost: x\r\n", {"header_s": 0.1}, b" 408 "),
    "no end of the headers": (b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000, {"max_header_bytes": 9000}, b" 431 "),
    "large headers": (b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000 + b"\r\n\r\n", {"max_header_bytes": 9000}, b" 431 "),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 4000 + b"\r\n", {"max_header_bytes": 9000}, b" 431 "),
    "a long path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", {"max_header_bytes": 9000}, b" 431 "),
    "no body": (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n", {"idle_s": 0.1}, b""),
    "half of a body": (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", {"idle_s": 0.1}, b""),
    "a slow body": (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", {"body_s": 0.1}, b""),
}


@pytest.mark.parametrize("name", UNFINISHED)
async def test_an_unfinished_or_too_large_request_ends_with_its_connection(name: str) -> None:
    data, limits, answer = UNFINISHED[name]
    async with _serve(**limits) as (port, server):
        reader, writer = await _say(port, data)
        got = await _until_closed(reader)
        assert answer in got or (b" 431 " in answer and got == b"")  # reset with bytes that nobody read
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            while server.server_state.connections:
                await asyncio.sleep(0.01)


async def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    async with _serve(idle_s=0.1) as (port, server):
        _, writer = await _say(port, b"GET /large HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            while server.server_state.connections:
                await asyncio.sleep(0.01)
        writer.close()


async def test_one_connection_too_many_is_refused_and_a_free_place_serves_again() -> None:
    async with _serve(max_connections=2) as (port, _):
        held = [await _say(port, b"GET / HT") for _ in range(2)]
        async with asyncio.timeout(DEADLINE_S):
            refused = b""
            while b" 503 " not in refused:  # a place is taken once the server has accepted
                reader, writer = await _say(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
                refused = await _until_closed(reader)
                writer.close()
            held[0][1].close()
            served = b""
            while b" 200 " not in served:
                reader, writer = await _say(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
                served = await _until_closed(reader)
                writer.close()
            held[1][1].close()


async def test_many_requests_of_any_size_go_over_one_connection() -> None:
    async with _serve(max_header_bytes=200) as (port, _):
        reader, writer = await _say(port, b"")
        for num_bytes in (0, 10**6, 5, 300_000, 0):
            for part in (b"POST / HTTP/1.1\r\ncontent-", f"length: {num_bytes}\r\n\r\n".encode(), bytes(num_bytes)):
                writer.write(part)
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(str(num_bytes))) == str(num_bytes).encode()
        writer.close()
