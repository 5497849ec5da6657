"""What every app that a run serves has in common."""

from __future__ import annotations

import gc
import socket

import httpx
from fastapi import FastAPI

from agentrl.supervision.serving import serving


async def test_answers_are_sent_at_once_and_not_held_back_for_an_acknowledgement() -> None:
    """Without TCP_NODELAY each answer took 44 ms, since uvicorn writes its head and its body one after the other."""
    async with serving(FastAPI(), host="127.0.0.1", port=0) as url, httpx.AsyncClient(base_url=url) as http:
        await http.get("/")
        port = int(url.rpartition(":")[2])
        (connection,) = [
            one
            for one in gc.get_objects()
            if type(one) is socket.socket and one.fileno() >= 0 and _is_between(one, port)
        ]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def _is_between(sock: socket.socket, port: int) -> bool:
    """Whether it is the server's side of a connection to `port`."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return sock.family == socket.AF_INET and int(sock.getsockname()[1]) == port
