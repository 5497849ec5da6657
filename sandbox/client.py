"""Async client of the service: sessions over pooled HTTP, with retries for infrastructure failures only.

Whatever a program does is a result; a failure of the service is an exception. Loads no server code, and does not depend
on episodes or rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from sandbox.embedded import local_service
from sandbox.protocol import (
    DEFAULT_MAX_OUTPUT_BYTES,
    DEFAULT_MAX_QUEUE_S,
    DEFAULT_TIMEOUT_S,
    INFRA_STATUSES,
    ExecRequest,
    ExecResult,
    Health,
    Limits,
    SandboxGone,
    SandboxUnavailable,
    SessionLost,
    SessionReply,
    SessionRequest,
)

__all__ = ["SandboxClient", "SandboxGone", "SandboxSession", "SandboxUnavailable", "SessionLost"]

MAX_ATTEMPTS = 6
BACKOFF_S = 0.1  # doubles, with jitter, up to BACKOFF_MAX_S
BACKOFF_MAX_S = 5.0
CALL_DEADLINE_S = 30.0
NUM_SYN_RETRIES = 2  # after 1 and 3 s; the kernel gives up a connection after 7 s
KEEPALIVE_S = 2.0  # shorter than the service's 5 s, so that this side closes idle connections first
CLOSE_ATTEMPTS = 3  # a service that is gone has lost the session anyway
REPLY_GRACE_S = 30.0  # for the answer to arrive, beyond queueing and running


class SandboxClient:
    """A client of one sandbox service, for any number of sessions at once.

    Example:
        async with SandboxClient("http://127.0.0.1:8321", token="...") as client: ...
        async with SandboxClient.embedded() as client: ...  # starts a local service
    """

    def __init__(
        self, url: str | Callable[[], str], token: str | None = None, *, return_timeout_s: float = 0.0
    ) -> None:
        """
        Args:
            url: of the service, or a function that gives it where a restarted service may have another.
            return_timeout_s: how long opening a session waits for a service that died to be restarted.
        """
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._url = url
        self.return_timeout_s = return_timeout_s
        self._closing: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return (self._url if isinstance(self._url, str) else self._url()).rstrip("/")

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for sessions that are closing, then close the connections. Sessions that are still open expire."""
        await asyncio.gather(*self._closing)
        if self._http is not None:
            await self._http.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def embedded(
        cls, backend: str = "auto", slots: int = 8, **options: int | str | bool
    ) -> AsyncIterator[SandboxClient]:
        """Start a service on a free port of 127.0.0.1. It ends with the block, also when this process is killed.

        `options` are the flags of `python -m sandbox`: `memory_bytes=2**28, allow_unsafe=True`.
        Raises SandboxUnavailable when no backend works on this machine.
        """
        async with local_service(backend, slots, options) as (url, token), cls(url, token) as client:
            yield client

    def session(self, *, seed: int | None = None, limits: Limits | None = None, ttl_s: float | None = None) -> _Lease:
        """`async with client.session() as session:` or `session = await client.session()` and `session.close()`."""
        return _Lease(self, SessionRequest(seed=seed, limits=limits, ttl_s=ttl_s, idempotency_key=uuid.uuid4().hex))

    async def open_session(
        self, *, seed: int | None = None, limits: Limits | None = None, ttl_s: float | None = None
    ) -> SandboxSession:
        """Open a session, which the caller closes. Raises SandboxUnavailable."""
        return await self.session(seed=seed, limits=limits, ttl_s=ttl_s)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives its caller but not this client."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def health(self) -> Health:
        """The service's state: backend, isolation, load. Raises SandboxUnavailable."""
        return Health.model_validate_json(await self.call("GET", "/healthz"))

    async def call(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        deadline_s: float = CALL_DEADLINE_S,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> bytes:
        """One request with retries, all within `deadline_s`.

        Raises SandboxUnavailable (SandboxGone, SessionLost), ValueError.
        """
        deadline = time.monotonic() + deadline_s
        url = URL(self.url + quote(path), encoded=True)  # unchanged, so that the service can refuse "a/../b"
        problem, failure = "no attempt was made", SandboxUnavailable
        for attempt in range(max_attempts):
            wait_s = 0.0
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    async with self._opened().request(method, url, data=content) as response:
                        body = await response.read()
            except aiohttp.ClientConnectorError as error:
                problem, failure = f"nothing answers there ({error.strerror})", SandboxGone
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                problem, failure = f"{type(error).__name__}: {error}", SandboxUnavailable
            else:
                failure = SandboxUnavailable
                if not (reason := _infra_failure(self.url, response.status, body)):
                    return body
                problem = reason
                wait_s = float(response.headers.get("retry-after", 0))
            wait_s = max(wait_s, min(BACKOFF_S * 2**attempt, BACKOFF_MAX_S)) * random.uniform(0.5, 1.0)
            if attempt == max_attempts - 1 or time.monotonic() + wait_s >= deadline:
                break
            await asyncio.sleep(wait_s)
        raise failure(f"{method} {self.url}{path.split('/sessions/')[0]}: {problem}")

    def _opened(self) -> aiohttp.ClientSession:
        """The HTTP session. The first call makes it, because it belongs to the running event loop."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_socket),
                headers=self._headers,
                trust_env=False,
            )
        return self._http


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose attempt to connect is ended by the kernel: a timer of an event loop that is late would end it."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, NUM_SYN_RETRIES)
    return opened


def _infra_failure(url: str, status: int, body: bytes) -> str:
    """The reason for a retry, or "" for a valid answer. Raises errors that no retry can fix."""
    text = body[:500].decode("utf-8", "replace") if status != 200 else ""
    match status:
        case 200:
            return ""
        case 404 if "session_lost" in text:
            raise SessionLost("the sandbox service no longer knows this session")
        case 429 | 503:
            return text
        case 401:
            raise SandboxUnavailable(f"the sandbox service at {url} refused the token")
        case code if code >= 500:
            return f"HTTP {code}: {text}"
        case code:
            raise ValueError(f"the sandbox service refused the request: HTTP {code}: {text}")


class SandboxSession:
    """A persistent interpreter. Calls of one session run one after the other.

    Example:
        async with client.session() as session:
            await session.exec("x = 6")
            result = await session.exec("x * 7", timeout_s=2)
            assert (result.status, result.result) == ("ok", "42")
    """

    def __init__(self, client: SandboxClient, reply: SessionReply) -> None:
        self._client, self._path = client, f"/v1/sessions/{reply.session_id}"
        self.limits = reply.limits
        self._closed = False

    async def __aenter__(self) -> SandboxSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def exec(
        self,
        code: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        stdin: str | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        max_queue_s: float = DEFAULT_MAX_QUEUE_S,
    ) -> ExecResult:
        """Run code and return what happened. Whatever the program does is a result.

        `max_queue_s`: how long the call may wait for a slot of the service, retries included.
        Raises SandboxUnavailable for failures of the service (SessionLost when it no longer knows the session), and
        ValueError for a request that it can never serve.
        """
        deadline = time.monotonic() + max_queue_s
        for attempt in range(MAX_ATTEMPTS):
            order = {"exec_id": uuid.uuid4().hex, "code": code, "stdin": stdin, "timeout_s": timeout_s}
            order |= {"max_output_bytes": max_output_bytes, "max_queue_s": max(deadline - time.monotonic(), 1e-3)}
            ExecRequest.model_validate(order)
            # json.dumps and not pydantic, because the code may hold lone surrogates; json.dumps escapes them
            content = await self._client.call(
                "POST",
                f"{self._path}/exec",
                content=json.dumps(order).encode(),
                deadline_s=max(deadline - time.monotonic(), 0) + timeout_s + REPLY_GRACE_S,
            )
            result = ExecResult.model_validate_json(content)
            if result.status not in INFRA_STATUSES:
                return result
            pause_s = min(BACKOFF_S * 2**attempt, BACKOFF_MAX_S)
            if time.monotonic() + pause_s >= deadline:
                break
            await asyncio.sleep(pause_s)
        raise SandboxUnavailable(f"{result.status}: {result.stderr}")

    async def put_file(self, path: str, data: bytes) -> None:
        """Write a file in the session's work folder. Raises SandboxUnavailable, ValueError (path or size refused)."""
        await self._client.call("PUT", f"{self._path}/files/{path}", content=data)

    async def get_file(self, path: str) -> bytes:
        """Read a file of the session's work folder. Raises SandboxUnavailable, ValueError (none, a link, too large)."""
        return await self._client.call("GET", f"{self._path}/files/{path}")

    async def close(self) -> None:
        """End the session. Safe to call twice or late. Under cancellation it continues in the background."""
        if self._closed:
            return
        self._closed = True
        await asyncio.shield(self._client._in_background(self._delete()))

    async def _delete(self) -> None:
        with contextlib.suppress(SandboxUnavailable):  # the session expires, or is gone already
            await self._client.call("DELETE", self._path, max_attempts=CLOSE_ATTEMPTS)


class _Lease:
    """What `client.session()` returns: awaitable, and an async context manager."""

    def __init__(self, client: SandboxClient, request: SessionRequest) -> None:
        self._client, self._request = client, request
        self._session: SandboxSession | None = None

    def __await__(self) -> Generator[Any, None, SandboxSession]:
        return self._open().__await__()

    async def _open(self) -> SandboxSession:
        """Open a session. Waits for a service that is gone, for up to the client's `return_timeout_s`."""
        deadline = time.monotonic() + self._client.return_timeout_s
        while True:
            try:
                return await self._open_now()
            except SandboxGone:
                if time.monotonic() >= deadline:
                    raise

    async def _open_now(self) -> SandboxSession:
        """Open a session. If cancelled, it continues in the background and closes the session that it gets."""
        opening = asyncio.ensure_future(self._request_session())
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._client._in_background(_give_back(opening))
            raise

    async def _request_session(self) -> SandboxSession:
        content = await self._client.call("POST", "/v1/sessions", content=self._request.model_dump_json().encode())
        return SandboxSession(self._client, SessionReply.model_validate_json(content))

    async def __aenter__(self) -> SandboxSession:
        self._session = await self._open()
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()


async def _give_back(opening: asyncio.Future[SandboxSession]) -> None:
    with contextlib.suppress(SandboxUnavailable, ValueError):  # then no session was opened
        await (await opening).close()
