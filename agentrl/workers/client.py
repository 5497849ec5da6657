"""The routes of agentrl/workers/api.py as a rollout worker calls them.

Every call has a deadline. An orchestrator that cannot be reached is tried again, since its answers are repeatable; then
the call raises OrchestratorGone. The calls run on a thread of their own: one pass of the worker's event loop may take a
minute where thousands of its episodes compute. Independent of what the worker plays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from agentrl.errors import ConfigError, InfraError, RunOver, WorkerExpired, boundary
from agentrl.supervision.loop_thread import LoopThread
from agentrl.workers.records import (
    ALIVE,
    ENGINE_FAILURE,
    JOIN,
    LEAVE,
    MEDIA_TYPE,
    ORDERS,
    PARK_S,
    RESULT,
    RUN,
    Alive,
    EngineFailure,
    Joined,
    Joining,
    Leaving,
    Orders,
    Report,
    Result,
    RunInfo,
    decode,
    encode,
)

T = TypeVar("T")

GONE_AFTER_S = 60.0
RETRY_EVERY_S = 0.5
CALL_TIMEOUT_S = 30.0
TRY_TIMEOUT_S = 2.0
ALIVE_EVERY_S = 0.5
KEEPALIVE_S = 2.0  # uvicorn closes idle connections after 5 s: the client must close them first
TOO_LARGE = 413


class OrchestratorGone(InfraError):
    """The orchestrator cannot be reached any more. Its run has most likely ended."""


class ResultTooLarge(InfraError):
    """A group is larger than the orchestrator takes. Example: hundreds of episodes of long contexts in one group."""


class OrchestratorLink:
    """One worker's connection to the orchestrator. Every method raises OrchestratorGone, ConfigError after a refusal,
    WorkerExpired where the lease has ended, RunOver.

    Example:
        async with OrchestratorLink("http://127.0.0.1:8401", token=token) as link:
            info = await link.run_info()
            lease = await link.join("rollout-worker-0")
            orders = await link.orders(Report(lease=lease))

    Args:
        gone_after_s: how long an orchestrator that cannot be reached is tried again.
    """

    def __init__(self, url: str, *, token: str, gone_after_s: float = GONE_AFTER_S) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": MEDIA_TYPE}
        self._gone_after_s = gone_after_s
        self._thread = LoopThread("calls to the orchestrator")
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await self._thread.__aenter__()
        self._session = await self._thread.run(self._opened())
        return self

    async def _opened(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S + PARK_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            trust_env=False,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread.run(self._session.close())
        await self._thread.__aexit__(kind, error, trace)

    async def run_info(self) -> RunInfo:
        """What the run is about."""
        return _decoded(await self._call("GET", RUN), RunInfo)

    async def join(self, name: str) -> str:
        """The lease of this worker, which is ready to play."""
        return _decoded(await self._call("POST", JOIN, Joining(name=name)), Joined).lease

    async def orders(self, report: Report) -> Orders:
        """What to do next. The sign of life."""
        return _decoded(await self._call("POST", ORDERS, report), Orders)

    async def result(self, result: Result) -> None:
        """A play has ended. Raises ResultTooLarge."""
        await self._call("POST", RESULT, result)

    async def engine_failed(self, failure: EngineFailure) -> None:
        """A request to an engine failed."""
        await self._call("POST", ENGINE_FAILURE, failure)

    async def leave(self, lease: str, reason: str) -> None:
        """This worker ends. Tried once: it is no loss if nobody hears it."""
        await self._thread.run(self._try_once(LEAVE, Leaving(lease=lease, reason=reason)))

    @asynccontextmanager
    async def signs_of_life(self, lease: str, has_moved: Callable[[], bool]) -> AsyncIterator[None]:
        """While the block runs, tell the orchestrator that this worker plays on, whenever `has_moved()`.

        It is called on another thread.
        """
        sending = self._thread.begin(self._send_signs(lease, has_moved))
        try:
            yield
        finally:
            sending.cancel()

    async def _send_signs(self, lease: str, has_moved: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            if has_moved():
                await self._try_once(ALIVE, Alive(lease=lease))

    async def _try_once(self, path: str, record: Any) -> None:
        with suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(TRY_TIMEOUT_S):
                await self._once("POST", path, encode(record))

    async def _call(self, method: str, path: str, record: Any = None) -> bytes:
        return await self._thread.run(self._until_answered(method, path, record))

    async def _until_answered(self, method: str, path: str, record: Any) -> bytes:
        content = b"" if record is None else encode(record)
        deadline = time.monotonic() + self._gone_after_s
        while True:
            try:
                status, answer = await self._once(method, path, content)
                if status < 500:
                    return self._checked(path, status, answer)
                reason = f"it answers {status}"
            except (aiohttp.ClientError, OSError) as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise OrchestratorGone(f"the orchestrator at {self.url} is gone: {reason}")
            await asyncio.sleep(RETRY_EVERY_S)

    async def _once(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        async with self._session.request(method, self.url + path, data=content) as response:
            return response.status, await response.read()

    def _checked(self, path: str, status: int, answer: bytes) -> bytes:
        """The body of a good answer."""
        if status == 200:
            return answer
        reason = _detail(answer)
        if status == 409:
            raise WorkerExpired(reason)
        if status == 410:
            raise RunOver(reason)
        if status == TOO_LARGE:
            raise ResultTooLarge(f"the group is too large to be sent: {reason}. Set a smaller rollout.group_size")
        raise ConfigError(f"the orchestrator at {self.url} refused {path} with status {status}: {reason}")


def _decoded(answer: bytes, record_type: type[T]) -> T:
    with boundary(InfraError, "reading the orchestrator's answer"):
        return decode(answer, record_type)


def _detail(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer, type=dict[str, Any])["detail"])
    except (msgspec.MsgspecError, KeyError):
        return answer.decode(errors="replace")[:500]
