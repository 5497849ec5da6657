"""Serving HTTP inside a run's event loop: free ports, an app for the length of a block, tokens, bodies with a limit.

Independent of what is served: each app brings its own routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from starlette.requests import ClientDisconnect

from agentrl.errors import ConfigError
from agentrl.supervision.secrets import is_bearer

T = TypeVar("T")


class BodyTooLarge(ValueError):
    """A request's body is longer than allowed, or announces that it is. Example: a route answers 413."""


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """`port`, or any free one for 0. Raises OSError when it is taken, or `host` is not an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return int(sock.getsockname()[1])


def configured_port(host: str, port: int, *, key: str) -> int:
    """`free_port` for the config setting `key`. Raises ConfigError, naming the setting, when the port is taken."""
    try:
        return free_port(host, port)
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port}: {error.strerror}. Choose another, or 0 for any free port"
        ) from error


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the process that runs the event loop handles Ctrl-C."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve for the length of the block; yields the base URL. Raises ConfigError when the port is taken.

    Example:
        async with serving(app, host="127.0.0.1", port=0) as url:
            ...
    """
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio turns Nagle's delays (40 ms an answer) off for these only
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(64)  # from here on a caller waits instead of being refused
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    task = asyncio.create_task(server.serve(sockets=[sock]), name=f"server {app.title}")
    try:
        yield f"http://{host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(10):
                await task
        finally:
            sock.close()


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """The whole body of a request.

    A body sent in chunks announces no length, so the bytes are counted as well: checking the header alone would let
    such a body grow until memory is full.

    Raises:
        BodyTooLarge: at once when the announced length is over the limit, else at the first byte over it.
        HTTPException: the client disconnected before the end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLarge(f"bodies are limited to {limit_bytes} bytes")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise BodyTooLarge(f"bodies are limited to {limit_bytes} bytes")
    except ClientDisconnect as error:
        raise HTTPException(400, "the body broke off") from error  # answered, so that the log shows no traceback
    return bytes(body)


def requires_token(token: str, detail: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency of an app: every route answers 401 with `detail` without `Authorization: Bearer TOKEN`."""

    async def check(request: Request) -> None:
        if not is_bearer(request.headers.get("authorization", ""), token):
            raise HTTPException(401, detail)

    return check


async def read_record(request: Request, record_type: type[T], *, limit_bytes: int) -> T:
    """The body of a request, msgpack of `record_type`.

    Raises HTTPException: 413 where it is longer than `limit_bytes`, 422 where it is no such record.
    """
    try:
        return msgspec.msgpack.decode(await read_body(request, limit_bytes=limit_bytes), type=record_type)
    except BodyTooLarge as error:
        raise HTTPException(413, str(error)) from error
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(422, str(error)) from error
