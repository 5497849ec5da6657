"""The wire of a vLLM server: JSON in, typed records out. Knows failures of the network, and nothing of training.

Every failure is an EngineError that names the URL and the mend; an answer that does not fit its record is one too. A
server that is not there, or whose connection broke, is an EngineGone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from agentrl.errors import EngineError, EngineGone
from agentrl.vllm_wire import Chunk, Failure

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0  # vLLM's server closes idle connections after 5 s: we must be first
RETRY_PAUSED_S = 0.05
EVENT, EVENT_END, DONE = b"data: ", b"\n\n", b"[DONE]"

MENDS = {
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1, and ask for a model it serves",
    500: "see the engine's log",
    503: "it is paused or shutting down; see the engine's log",
}


class VLLMServer:
    """One server. Cancelling a call closes its connection, by which vLLM knows to abort the request.

    Every call in progress has a client with one connection of its own: a shared connection pool of httpx takes time
    in the square of its idle connections for each request (measured: 4 ms a request at 64).
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._clients: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def get(self, path: str, reply: type[T], *, timeout_s: float | None = None) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("GET", path, None, reply, timeout_s)

    async def post(
        self, path: str, body: dict[str, Any] | None, reply: type[T], *, timeout_s: float | None = None
    ) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("POST", path, body, reply, timeout_s)

    async def status(self, path: str, *, timeout_s: float) -> int:
        """The status of a GET, whatever it is. Raises EngineError when there is none."""
        with self._failures_named(f"engine at {self.url}: GET {path}", timeout_s):
            async with asyncio.timeout(timeout_s):
                return (await self._request("GET", path, content=b"")).status_code

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Chunk]:
        """The events of the answer as they come; each must come within the server's deadline.

        Raises EngineGone where the connection breaks before the last event, EngineError otherwise.
        """
        what = f"engine at {self.url}: POST {path}"
        content = msgspec.json.encode(body)
        decoder = msgspec.json.Decoder(Chunk)
        with self._failures_named(what, self._timeout_s):
            async with aclosing(self._events(what, path, content)) as events:
                while True:
                    async with asyncio.timeout(self._timeout_s):
                        event = await anext(events, DONE)
                    if event == DONE:
                        return
                    yield _decoded(decoder, event, what)

    async def _events(self, what: str, path: str, content: bytes) -> AsyncGenerator[bytes]:
        """Server-sent events, data only. Raises EngineGone where the stream has no end."""
        client = self._idle.pop() if self._idle else self._new_client()
        try:
            while True:
                async with client.stream("POST", path, content=content) as response:
                    if response.status_code == 503:
                        await asyncio.sleep(RETRY_PAUSED_S)
                        continue
                    if response.status_code != 200:
                        await response.aread()
                        raise EngineError(_refusal(what, response))
                    rest = b""
                    async for piece in response.aiter_raw():
                        *events, rest = (rest + piece).split(EVENT_END)
                        for event in events:
                            data = event.removeprefix(EVENT)
                            yield data
                            if data == DONE:
                                return
                    raise EngineGone(f"{what}: the stream ended before its last token; see the engine's log")
        finally:
            self._idle.append(client)

    async def _request(self, method: str, path: str, content: bytes) -> httpx.Response:
        client = self._idle.pop() if self._idle else self._new_client()
        try:
            return await client.request(method, path, content=content)
        finally:
            self._idle.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEEPALIVE_S),
            headers={"content-type": "application/json"},
            trust_env=False,
            verify=self._ssl,
        )
        self._clients.append(client)
        return client

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, reply: type[T], timeout_s: float | None
    ) -> T:
        """Raises EngineError for a server that is gone, slow, refuses, or answers what `reply` does not fit."""
        what = f"engine at {self.url}: {method} {path.partition('?')[0]}"
        content = b"" if body is None else msgspec.json.encode(body)
        deadline_s = timeout_s or self._timeout_s
        with self._failures_named(what, deadline_s):
            async with asyncio.timeout(deadline_s):
                response = await self._request(method, path, content=content)
                while response.status_code == 503:
                    await asyncio.sleep(RETRY_PAUSED_S)
                    response = await self._request(method, path, content=content)
        if response.status_code != 200:
            raise EngineError(_refusal(what, response))
        return _decoded(msgspec.json.Decoder(reply), response.content, what)

    @contextmanager
    def _failures_named(self, what: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise EngineError(f"{what} was not answered within {timeout_s:g} s; see the engine's log") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineGone(f"{what}: nothing listens there; is the engine running? ({error})") from error
        except httpx.TransportError as error:
            raise EngineGone(f"{what}: the connection broke ({type(error).__name__}); see the engine's log") from error


def _decoded(decoder: msgspec.json.Decoder[T], content: bytes, what: str) -> T:
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{what} answered what this client does not understand: {error}") from error


def _refusal(what: str, response: httpx.Response) -> str:
    mend = MENDS.get(response.status_code)
    return f"{what} failed with status {response.status_code}: {_reason(response)}" + (f"; {mend}" if mend else "")


def _reason(response: httpx.Response) -> str:
    """The server's own words, short."""
    try:
        text = msgspec.json.decode(response.content, type=Failure).error.message
    except msgspec.MsgspecError:
        text = response.text
    return text.strip()[:500] or "no reason given"
