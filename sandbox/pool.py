"""Sessions, the slots they execute on, and interpreters kept ready. Independent of HTTP and of any one backend."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from sandbox.backends.base import Backend, BackendError
from sandbox.kept import KeptResults
from sandbox.protocol import MAX_FILE_BYTES, ExecRequest, ExecResult, Limits
from sandbox.supervisor import Interpreter
from sandbox.tenants import FairSlots, Shares

log = logging.getLogger(__name__)
T = TypeVar("T")

FILE_TIMEOUT_S = 10.0
NUM_KEPT_RESULTS = 16  # per session, for clients that repeat a request
KEPT_SESSION_BYTES = 32 * 1024**2
KEPT_TENANT_BYTES = 256 * 1024**2
NUM_KEPT_KEYS = 4096
REAP_INTERVAL_S = 5.0
REFILL_PAUSE_S = 1.0
MAX_STARTING = 4  # interpreters made ready at the same time


class Overloaded(Exception):
    """No capacity is free now. The message names which limit was reached."""


class UnknownSession(Exception):
    """No such session for this tenant: never opened, closed, expired, or lost with an earlier service."""


class FileRefused(Exception):
    """The session refused a file request."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One tenant's interpreter over time. The first call takes an interpreter from the warm ones.

    Example: `session = pool.open_session(tenant="0", limits=None, ttl_s=None, seed=7, key=None)`.
    """

    id: str
    tenant: str
    limits: Limits
    seed: int | None
    ttl_s: float
    last_used_s: float
    interpreter: Interpreter | None = None
    has_state: bool = False  # something has run, so a fresh interpreter means a loss of state
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    results: OrderedDict[str, asyncio.Task[ExecResult]] = field(default_factory=OrderedDict)


@dataclass(slots=True, kw_only=True)
class PoolSettings:
    """Sizes of a pool.

    >>> PoolSettings(slots=2).max_sessions
    1024
    """

    slots: int = 8
    warm: int = 8
    max_sessions: int = 1024
    max_queue: int = 4096
    num_tenants: int = 1
    default_ttl_s: float = 3600.0
    limits: Limits = field(default_factory=Limits)


class Pool:
    """Keeps interpreters warm while it is open (`async with Pool(...)`), and ends all of them at the end.

    Example:
        async with Pool(backend, PoolSettings(slots=2)) as pool:
            app = create_app(pool, tokens=["secret"])
    """

    def __init__(self, backend: Backend, settings: PoolSettings) -> None:
        self.backend, self.settings = backend, settings
        self.num_running = 0
        self.num_queued = 0
        self._sessions: dict[str, Session] = {}
        self._keys: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._kept = KeptResults(
            self._forget,
            per_session=NUM_KEPT_RESULTS,
            session_bytes=KEPT_SESSION_BYTES,
            tenant_bytes=KEPT_TENANT_BYTES,
        )
        self._slots = FairSlots(settings.slots)
        self._open = Shares(settings.max_sessions, num_tenants=settings.num_tenants)
        self._queued = Shares(settings.max_queue, num_tenants=settings.num_tenants)
        self._warm: deque[Interpreter] = deque()
        self._num_starting = 0
        self._wants_refill = asyncio.Event()
        self._loops: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()  # never cancelled, because they free resources of the host

    async def __aenter__(self) -> Pool:
        self._background(self._loops, self._keep_warm(), "warm interpreters")
        self._background(self._loops, self._close_expired(), "expired sessions")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        tasks: list[asyncio.Task[Any]] = list(self._loops)
        for session in self._sessions.values():
            tasks += [task for task in session.results.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        interpreters = [session.interpreter for session in self._sessions.values() if session.interpreter]
        closings = [one.close() for one in [*interpreters, *self._warm]]
        await asyncio.gather(*closings, *self._closings, return_exceptions=True)
        self._sessions.clear()
        self._warm.clear()

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def num_warm(self) -> int:
        """Interpreters ready for a session."""
        return len(self._warm)

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_session(
        self, *, tenant: str, limits: Limits | None, ttl_s: float | None, seed: int | None, key: str | None
    ) -> Session:
        """A new session, or the one this tenant opened under the same key. Raises Overloaded."""
        if key is not None and (known := self._sessions.get(self._keys.get((tenant, key), ""))) is not None:
            return known
        if not self._open.add(tenant):
            raise Overloaded(
                f"{len(self._sessions)} sessions are open, of {self.settings.max_sessions} for all tenants"
            )
        session = Session(
            id=secrets.token_urlsafe(24),
            tenant=tenant,
            limits=self._clamp(limits),
            seed=seed,
            ttl_s=min(ttl_s or self.settings.default_ttl_s, self.settings.default_ttl_s),
            last_used_s=time.monotonic(),
        )
        self._sessions[session.id] = session
        if key is not None:
            self._keys[tenant, key] = session.id
            if len(self._keys) > NUM_KEPT_KEYS:
                self._keys.popitem(last=False)
        return session

    def _clamp(self, limits: Limits | None) -> Limits:
        most = self.settings.limits
        if limits is None:
            return most
        return Limits(
            memory_bytes=min(limits.memory_bytes, most.memory_bytes),
            num_processes=min(limits.num_processes, most.num_processes),
        )

    def find(self, session_id: str, tenant: str) -> Session:
        """The session with this id. Raises UnknownSession, also for another tenant's session."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise UnknownSession(session_id)
        session.last_used_s = time.monotonic()
        return session

    def close_session(self, session: Session) -> None:
        """Remove the session at once. Its interpreter, and a call in progress, end in the background."""
        session.closed = True
        if self._sessions.pop(session.id, None) is not None:
            self._open.remove(session.tenant)
        self._kept.close_session(session.tenant, session.id)
        for task in session.results.values():
            task.cancel()
        if session.interpreter is not None:
            self._discard(session.interpreter)
            session.interpreter = None

    # -- calls --------------------------------------------------------------------------------------------------

    def execute(self, session: Session, request: ExecRequest) -> asyncio.Task[ExecResult]:
        """Start an execution as a task, or find the one with its exec_id. Cancelling stops it. Raises Overloaded."""
        if (known := session.results.get(request.exec_id)) is not None:
            return known
        if not self._queued.has_room(session.tenant):
            raise Overloaded(f"{self.num_queued} executions are waiting, of {self.settings.max_queue} for all tenants")
        task = asyncio.create_task(self._execute(session, request), name="execution")
        session.results[request.exec_id] = task
        task.add_done_callback(lambda done: self._keep(session, request.exec_id, done))
        return task

    def _keep(self, session: Session, exec_id: str, done: asyncio.Task[ExecResult]) -> None:
        if done.cancelled() or done.exception() is not None:
            session.results.pop(exec_id, None)
        elif not session.closed:
            self._kept.add(session.tenant, session.id, exec_id, done.result())

    def _forget(self, session_id: str, exec_id: str) -> None:
        self._sessions[session_id].results.pop(exec_id, None)

    async def _execute(self, session: Session, request: ExecRequest) -> ExecResult:
        arrived = time.monotonic()
        try:
            return await self._on_a_slot(
                session,
                lambda one, is_fresh: self._run(session, request, one, is_fresh, arrived),
                max_queue_s=request.max_queue_s,
            )
        except Overloaded as error:
            return ExecResult(status="overloaded", stderr=str(error), queue_s=time.monotonic() - arrived)
        except asyncio.CancelledError:
            # kept for clients that repeat the request; a failure of the service, never an observation
            return ExecResult(status="sandbox_error", stderr="cancelled: the client went away or closed the session")
        except BackendError as error:
            log.error("an execution failed for the sandbox's own reasons: %s", error)
            return ExecResult(status="sandbox_error", stderr=str(error), queue_s=time.monotonic() - arrived)

    async def _run(
        self, session: Session, request: ExecRequest, interpreter: Interpreter, is_fresh: bool, arrived: float
    ) -> ExecResult:
        queue_s = time.monotonic() - arrived
        result = await interpreter.execute(
            request.code,
            timeout_s=request.timeout_s,
            max_output_bytes=request.max_output_bytes,
            stdin=request.stdin,
            seed=session.seed if is_fresh else None,
        )
        state_lost = is_fresh and session.has_state
        session.has_state = True
        return result.model_copy(update={"queue_s": queue_s, "state_lost": state_lost})

    async def put_file(self, session: Session, path: str, data: bytes) -> None:
        """Write a file below the session's work folder. Raises FileRefused, BackendError, Overloaded."""
        await self._transfer(session, {"op": "put", "path": path, "data": base64.b64encode(data).decode()})
        session.has_state = True

    async def get_file(self, session: Session, path: str) -> bytes:
        """Read a file below the session's work folder. Raises FileRefused, BackendError, Overloaded."""
        answer = await self._transfer(session, {"op": "get", "path": path, "max_bytes": MAX_FILE_BYTES})
        try:
            if answer is None:
                raise ValueError("no content")
            return base64.b64decode(answer, validate=True)
        except ValueError as error:
            raise FileRefused("the session's answer is not a file") from error

    async def _transfer(self, session: Session, request: dict[str, object]) -> str | None:
        async def transfer(interpreter: Interpreter, _is_fresh: bool) -> str | None:
            frame = await interpreter.transfer(request, timeout_s=FILE_TIMEOUT_S, max_frame_bytes=2 * MAX_FILE_BYTES)
            if not frame.ok:
                raise FileRefused(str(frame.traceback)[:500])
            return frame.result

        return await self._on_a_slot(session, transfer, max_queue_s=FILE_TIMEOUT_S)

    async def _on_a_slot(
        self, session: Session, work: Callable[[Interpreter, bool], Awaitable[T]], *, max_queue_s: float
    ) -> T:
        """Run `work(interpreter, is_fresh)` when the session and a slot are free. Raises BackendError, Overloaded."""
        async with contextlib.AsyncExitStack() as held:
            await self._queue(held, session, max_queue_s)
            self.num_running += 1
            try:
                interpreter, is_fresh = await self._interpreter_of(session)
                return await work(interpreter, is_fresh)
            finally:
                self.num_running -= 1
                self._drop_if_dead(session)
                session.last_used_s = time.monotonic()

    async def _queue(self, held: contextlib.AsyncExitStack, session: Session, max_queue_s: float) -> None:
        if not self._queued.add(session.tenant):
            raise Overloaded(f"{self.num_queued} executions are waiting, of {self.settings.max_queue} for all tenants")
        self.num_queued += 1
        try:
            async with asyncio.timeout(max_queue_s):
                await held.enter_async_context(session.lock)
                await held.enter_async_context(self._slots.of(session.tenant))
        except TimeoutError:
            raise Overloaded(f"no slot came free within {max_queue_s:.1f} s") from None
        finally:
            self.num_queued -= 1
            self._queued.remove(session.tenant)

    async def _interpreter_of(self, session: Session) -> tuple[Interpreter, bool]:
        self._drop_if_dead(session)
        if session.closed:
            raise BackendError("the session was closed")
        if session.interpreter is not None:
            return session.interpreter, False
        interpreter = await self._take()
        if session.closed:
            self._discard(interpreter)
            raise BackendError("the session was closed")
        try:
            if session.limits != self.settings.limits:
                await interpreter.restrict(session.limits)
        except BaseException:
            self._discard(interpreter)
            raise
        session.interpreter = interpreter
        return interpreter, True

    def _drop_if_dead(self, session: Session) -> None:
        if session.interpreter is not None and not session.interpreter.is_alive:
            self._discard(session.interpreter)
            session.interpreter = None

    # -- interpreters -------------------------------------------------------------------------------------------

    async def _take(self) -> Interpreter:
        self._wants_refill.set()
        while self._warm:
            interpreter = self._warm.popleft()
            if interpreter.is_alive:
                return interpreter
            self._discard(interpreter)
        return await Interpreter.start(self.backend)

    def _discard(self, interpreter: Interpreter) -> None:
        self._background(self._closings, interpreter.close(), "closing an interpreter")

    def _background(self, kept: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        kept.add(task)
        task.add_done_callback(kept.discard)
        task.add_done_callback(_log_failure)

    async def _keep_warm(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_STARTING):
                group.create_task(self._refill(), name=f"refill {number}")

    async def _refill(self) -> None:
        while True:
            while len(self._warm) + self._num_starting < self.settings.warm:
                self._num_starting += 1
                try:
                    self._warm.append(await Interpreter.start(self.backend))
                except BackendError as error:
                    log.error("no interpreter could be made ready: %s", error)
                    await asyncio.sleep(REFILL_PAUSE_S)
                finally:
                    self._num_starting -= 1
            self._wants_refill.clear()
            await self._wants_refill.wait()

    async def _close_expired(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if not session.lock.locked() and now - session.last_used_s > session.ttl_s:
                    self.close_session(session)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
