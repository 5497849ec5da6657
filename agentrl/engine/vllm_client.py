"""HTTP client of a vLLM server: JSON out, typed records in (vllm_schema.py). Independent of training.

Every failure is an EngineError that names the URL and how to fix it, including an answer that does not fit its record.
A server that cannot be reached, or whose connection broke, is an EngineGone.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from agentrl.engine.vllm_schema import Chunk, Failure
from agentrl.errors import EngineError, EngineGone

T = TypeVar("T")

NUM_SYN_RETRIES = 3  # after 1, 3 and 7 s; the kernel gives up a connection after 15 s
KEEPALIVE_S = 2.0  # vLLM's server closes idle connections after 5 s: the client must close them first
RETRY_PAUSED_S = 0.05
MAX_REASON = 500
EVENT_STREAM = "text/event-stream"
EVENT, EVENT_END, DONE = b"data: ", b"\n\n", b"[DONE]"
CHUNK = msgspec.json.Decoder(Chunk)

FIXES = {
    401: "set AGENTRL_ENGINE_TOKEN to the token that the server was started with",
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1, and ask for a model it serves",
    500: "see the engine's log",
    503: "it is paused or shutting down; see the engine's log",
}


class VLLMHttpClient:
    """The HTTP connection to one server. Cancelling a call closes its connection, which makes vLLM abort the request.

    Uses aiohttp instead of httpx: a streamed answer of 64 tokens takes a third of the processor time
    (benchmarks/engine.md).

    Example:
        models = await VLLMHttpClient("http://127.0.0.1:8000", timeout_s=10).get("/v1/models", Models)
    """

    def __init__(self, url: str | Callable[[], str], *, timeout_s: float, token: str | None = None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Base URL of the server; a server that is restarted may come back at another."""
        return (self._url if isinstance(self._url, str) else self._url()).rstrip("/")

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, reply: type[T], *, timeout_s: float | None = None) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("GET", path, None, reply, timeout_s)

    async def post(
        self, path: str, body: dict[str, Any] | None, reply: type[T], *, timeout_s: float | None = None
    ) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("POST", path, body, reply, timeout_s)

    async def status(self, path: str, *, timeout_s: float) -> int:
        """The status code of a GET. Raises EngineError when there is no answer."""
        with self._failures_named(f"engine at {self.url}: GET {path}", timeout_s):
            async with asyncio.timeout(timeout_s):
                return (await self._request("GET", path, b""))[0]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Chunk]:
        """The events of the answer as they arrive; each must arrive within the server's deadline.

        Raises EngineGone where the connection breaks before the last event, EngineError otherwise.
        """
        what = f"engine at {self.url}: POST {path}"
        content = msgspec.json.encode(body)
        with self._failures_named(what, self._timeout_s):
            async with aclosing(self._events(what, path, content)) as events:
                while True:
                    async with asyncio.timeout(self._timeout_s):
                        event = await anext(events, DONE)
                    if event == DONE:
                        return
                    chunk = _decoded(CHUNK, event, what)
                    if chunk.error is not None:
                        raise EngineError(f"{what} broke off: {chunk.error.message.strip()[:MAX_REASON]}")
                    yield chunk

    async def _events(self, what: str, path: str, content: bytes) -> AsyncGenerator[bytes]:
        """The data of server-sent events. Raises EngineGone where the stream breaks off."""
        while True:
            async with await self._post(path, content) as response:
                if response.status == 503:
                    await asyncio.sleep(RETRY_PAUSED_S)
                    continue
                if response.status != 200:
                    raise EngineError(_refusal(what, response.status, await response.read()))
                if response.content_type != EVENT_STREAM:
                    raise EngineError(
                        f"{what} gave an answer that this client does not understand: {response.content_type}"
                    )
                rest = b""
                async for piece in response.content.iter_any():
                    *events, rest = (rest + piece).split(EVENT_END)
                    for event in events:
                        data = event.removeprefix(EVENT)
                        if data == DONE:
                            await response.read()  # to the end, so that the connection can be reused
                            return
                        yield data
                raise EngineGone(f"{what}: the stream ended before its last token; see the engine's log")

    async def _post(self, path: str, content: bytes) -> aiohttp.ClientResponse:
        """Retries once where the server had closed an idle connection: it did not read the request then."""
        try:
            return await self._opened().post(self.url + path, data=content)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._opened().post(self.url + path, data=content, headers={"connection": "close"})

    async def _request(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        # Not kept alive: after a 500 the server closes the connection, and the next call would fail on it.
        headers = {"connection": "close"}
        async with self._opened().request(method, self.url + path, data=content, headers=headers) as response:
            return response.status, await response.read()

    def _opened(self) -> aiohttp.ClientSession:
        """The session, created by the first call because it belongs to the event loop that is running then."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_socket),
                headers=self._headers,
                trust_env=False,
            )
        return self._session

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, reply: type[T], timeout_s: float | None
    ) -> T:
        """Raises EngineError for a server that is gone, is slow, refuses, or answers something other than `reply`."""
        what = f"engine at {self.url}: {method} {path.partition('?')[0]}"
        content = b"" if body is None else msgspec.json.encode(body)
        deadline_s = timeout_s or self._timeout_s
        with self._failures_named(what, deadline_s):
            async with asyncio.timeout(deadline_s):
                status, answer = await self._request(method, path, content)
                while status == 503:
                    await asyncio.sleep(RETRY_PAUSED_S)
                    status, answer = await self._request(method, path, content)
        if status != 200:
            raise EngineError(_refusal(what, status, answer))
        return _decoded(msgspec.json.Decoder(reply), answer, what)

    @contextmanager
    def _failures_named(self, what: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            if error.errno == errno.ETIMEDOUT:
                raise EngineGone(f"{what}: its machine does not answer; is it running, and its network?") from error
            raise EngineGone(f"{what}: nothing listens there; is the engine running? ({error.strerror})") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise EngineError(f"{what} was not answered within {timeout_s:g} s; see the engine's log") from error
            raise EngineGone(f"{what}: the connection broke ({type(error).__name__}); see the engine's log") from error


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose attempt to connect is ended by the kernel.

    A timer of the event loop would end it where the loop itself is late, as it is with thousands of episodes.
    """
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, NUM_SYN_RETRIES)
    return opened


def _decoded(decoder: msgspec.json.Decoder[T], content: bytes, what: str) -> T:
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{what} gave an answer that this client does not understand: {error}") from error


def _refusal(what: str, status: int, answer: bytes) -> str:
    fix = FIXES.get(status)
    return f"{what} failed with status {status}: {_reason(answer)}" + (f"; {fix}" if fix else "")


def _reason(answer: bytes) -> str:
    """The reason that the server gives, shortened."""
    try:
        text = msgspec.json.decode(answer, type=Failure).error.message
    except msgspec.MsgspecError:
        text = answer.decode(errors="replace")
    return text.strip()[:MAX_REASON] or "no reason given"
