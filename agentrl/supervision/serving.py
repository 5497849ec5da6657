"""An HTTP app for the length of a block, inside the event loop that runs everything else. Knows no route."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from agentrl.errors import ConfigError


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: Ctrl-C belongs to whoever runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve for the length of the block; yields the base URL. Raises ConfigError when the port is taken."""
    sock = socket.socket()
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
