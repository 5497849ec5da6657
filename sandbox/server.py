"""Serves a pool over HTTP: routes, tokens, status codes, metrics. Independent of processes and isolation."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import fastapi
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox.backends.base import BackendError
from sandbox.bodies import MAX_TABLE_ENTRIES, BodyRefused, read_record
from sandbox.pool import FileRefused, Overloaded, Pool, Session, UnknownSession
from sandbox.protocol import (
    MAX_FILE_BYTES,
    MAX_SESSION_BODY_BYTES,
    ExecRequest,
    ExecResult,
    Health,
    SessionReply,
    SessionRequest,
    Text,
)

MAX_BODY_BYTES = 96 * 1024**2  # code may be sent with every character escaped
MAX_INCOMING_BYTES = 256 * 1024**2  # of one tenant's bodies at the same time
MAX_FETCHED_BYTES = 32 * 1024**2  # of the files that one /run_code answers with
RETRY_AFTER_S = 1
OPEN_PATHS = ("/healthz", "/metrics")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metrics:
    """Counters of one service, in a registry of their own.

    Example: `metrics = Metrics(pool)`, then `metrics.record(result)` after each execution.
    """

    def __init__(self, pool: Pool) -> None:
        self.registry = CollectorRegistry()
        self.executions = Counter("sandbox_executions", "Executions by status", ["status"], registry=self.registry)
        self.wall = Histogram("sandbox_exec_wall_seconds", "Run time", buckets=_SECONDS, registry=self.registry)
        self.queue = Histogram("sandbox_exec_queue_seconds", "Wait time", buckets=_SECONDS, registry=self.registry)
        self.lost = Counter("sandbox_state_lost", "Calls that found a fresh interpreter", registry=self.registry)
        self.refused = Counter("sandbox_refused", "Requests answered 429", registry=self.registry)
        for name, text, read in (
            ("sandbox_sessions", "Open sessions", lambda: pool.num_sessions),
            ("sandbox_running", "Executions on a slot", lambda: pool.num_running),
            ("sandbox_queued", "Executions waiting", lambda: pool.num_queued),
            ("sandbox_warm", "Interpreters ready", lambda: pool.num_warm),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def record(self, result: ExecResult) -> None:
        """Count one execution."""
        self.executions.labels(result.status).inc()
        self.wall.observe(result.wall_s)
        self.queue.observe(result.queue_s)
        self.lost.inc(int(result.state_lost))


class RunCodeRequest(BaseModel):
    """Body of POST /run_code, as SandboxFusion's clients send it; fields of other languages are ignored.

    Example: `RunCodeRequest(code="print(6 * 7)", run_timeout=2)`.
    """

    model_config = ConfigDict(extra="ignore")

    code: Text
    language: str = "python"
    run_timeout: Annotated[float, Field(gt=0, le=600)] = 10.0
    stdin: Text | None = None
    files: dict[str, str | None] = {}
    """Path -> base64."""
    fetch_files: Annotated[list[str], Field(max_length=MAX_TABLE_ENTRIES)] = []


def create_app(pool: Pool, *, tokens: Sequence[str] = ()) -> FastAPI:
    """The app for a pool that is already open. Each token is a tenant; without tokens there is one tenant."""
    metrics = Metrics(pool)
    app = FastAPI(title="sandbox", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, tokens=tuple(token.encode() for token in tokens))
    _add_error_handlers(app, metrics)
    _add_status_routes(app, pool, metrics)
    _add_session_routes(app, pool, metrics)
    _add_file_routes(app, pool)
    _add_run_code(app, pool, metrics)
    return app


async def _tenant(request: Request) -> str:  # async, because FastAPI runs a plain function in a thread
    return str(request.scope["sandbox_tenant"])


Tenant = Annotated[str, Depends(_tenant)]


class Guard:
    """Outermost layer: checks the token and the size of the body. Plain ASGI, so that disconnects pass through.

    Example: `app.add_middleware(Guard, tokens=(b"secret",))`.
    """

    def __init__(self, app: ASGIApp, tokens: tuple[bytes, ...]) -> None:
        self._app, self._tokens = app, tokens
        self._incoming_bytes: dict[str, int] = {}  # tenant -> announced by its requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer refused requests here, and pass on the others."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
            # every token is compared, so that the time taken does not reveal a near match
            found = [number for number, token in enumerate(self._tokens) if hmac.compare_digest(given, token)]
            scope["sandbox_tenant"] = tenant = str(found[0]) if found else ""
            refusal = _size_refusal(headers)
            if self._tokens and not found and scope["path"] not in OPEN_PATHS:
                refusal = _error(401, "unauthorized", "wrong or missing bearer token")
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            await self._with_budget(tenant, int(headers.get("content-length", "0")), scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _with_budget(self, tenant: str, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request when all bodies of its tenant fit into memory, this one included."""
        incoming_bytes = self._incoming_bytes.get(tenant, 0) + num_bytes
        if num_bytes and incoming_bytes > MAX_INCOMING_BYTES:
            message = f"at most {MAX_INCOMING_BYTES} bytes of bodies at the same time"
            refusal = _error(429, "overloaded", message, {"Retry-After": str(RETRY_AFTER_S)})
            await refusal(scope, receive, send)
            return
        self._incoming_bytes[tenant] = incoming_bytes
        try:
            await self._app(scope, receive, send)
        finally:
            self._incoming_bytes[tenant] -= num_bytes


def _size_refusal(headers: Headers) -> Response | None:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdigit():
        return _error(411, "length_required", "send a content-length")
    if int(length) > MAX_BODY_BYTES:
        return _error(413, "too_large", f"at most {MAX_BODY_BYTES} bytes")
    return None


def _error(status_code: int, error: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": error, "message": message}, status_code, headers)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, BodyRefused)
        message = str(error).encode("utf-8", "backslashreplace").decode()
        return _error(error.status_code, "too_large" if error.status_code == 413 else "invalid", message[:2000])

    async def overloaded(_request: Request, error: Exception) -> Response:
        metrics.refused.inc()
        return _error(429, "overloaded", str(error), {"Retry-After": str(RETRY_AFTER_S)})

    async def unknown(_request: Request, _error_: Exception) -> Response:
        return _error(404, "session_lost", "no such session: closed, expired, or lost when the service restarted")

    async def refused(_request: Request, error: Exception) -> Response:
        return _error(400, "file_refused", str(error).encode("utf-8", "backslashreplace").decode())

    async def backend(_request: Request, error: Exception) -> Response:
        return _error(503, "sandbox_error", str(error), {"Retry-After": str(RETRY_AFTER_S)})

    app.add_exception_handler(BodyRefused, invalid)
    app.add_exception_handler(Overloaded, overloaded)
    app.add_exception_handler(UnknownSession, unknown)
    app.add_exception_handler(FileRefused, refused)
    app.add_exception_handler(BackendError, backend)


def _add_status_routes(app: FastAPI, pool: Pool, metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        backend = pool.backend
        return Health(
            status="unsafe" if backend.name == "unsafe" else "degraded" if backend.degraded else "ok",
            backend=backend.name,
            isolation=backend.isolation,
            degraded=backend.degraded,
            slots=pool.settings.slots,
            sessions=pool.num_sessions,
            running=pool.num_running,
            warm=pool.num_warm,
        )

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_session_routes(app: FastAPI, pool: Pool, metrics: Metrics) -> None:
    @app.post("/v1/sessions")
    async def open_session(request: Request, tenant: Tenant) -> SessionReply:
        body = await read_record(request, SessionRequest, limit_bytes=MAX_SESSION_BODY_BYTES)
        session = pool.open_session(
            tenant=tenant, limits=body.limits, ttl_s=body.ttl_s, seed=body.seed, key=body.idempotency_key
        )
        return SessionReply(session_id=session.id, backend=pool.backend.name, limits=session.limits)

    @app.post("/v1/sessions/{session_id}/exec")
    async def execute(session_id: str, request: Request, tenant: Tenant) -> ExecResult:
        pool.find(session_id, tenant)  # first: no body is read for a session that is unknown
        body = await read_record(request, ExecRequest, limit_bytes=MAX_BODY_BYTES)
        return await _execute(pool, pool.find(session_id, tenant), body, request, metrics)

    @app.delete("/v1/sessions/{session_id}")
    async def close_session(session_id: str, tenant: Tenant) -> dict[str, bool]:
        pool.close_session(pool.find(session_id, tenant))
        return {"closed": True}


async def _execute(pool: Pool, session: Session, body: ExecRequest, request: Request, metrics: Metrics) -> ExecResult:
    """Run the call and return the result. The execution is cancelled when the client disconnects first."""
    is_new = body.exec_id not in session.results
    task = pool.execute(session, body)
    if is_new:
        task.add_done_callback(lambda done: None if done.cancelled() else metrics.record(done.result()))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_file_routes(app: FastAPI, pool: Pool) -> None:
    @app.put("/v1/sessions/{session_id}/files/{path:path}")
    async def put_file(session_id: str, path: str, request: Request, tenant: Tenant) -> Response:
        session = pool.find(session_id, tenant)
        if int(request.headers.get("content-length", "0")) > MAX_FILE_BYTES:
            return _error(413, "too_large", f"a file has at most {MAX_FILE_BYTES} bytes")
        data = await request.body()
        await pool.put_file(session, path, data)
        return JSONResponse({"num_bytes": len(data)})

    @app.get("/v1/sessions/{session_id}/files/{path:path}")
    async def get_file(session_id: str, path: str, tenant: Tenant) -> Response:
        data = await pool.get_file(pool.find(session_id, tenant), path)
        return Response(data, media_type="application/octet-stream")


def _add_run_code(app: FastAPI, pool: Pool, metrics: Metrics) -> None:
    @app.post("/run_code")
    async def run_code(request: Request, tenant: Tenant) -> dict[str, Any]:
        body = await read_record(request, RunCodeRequest, limit_bytes=MAX_BODY_BYTES)
        if body.language != "python":
            raise fastapi.HTTPException(400, f"language {body.language!r} is not supported: python is")
        session = pool.open_session(tenant=tenant, limits=None, ttl_s=None, seed=None, key=None)
        try:
            for path, data in body.files.items():
                try:
                    await pool.put_file(session, path, base64.b64decode(data or ""))
                except ValueError as error:
                    raise FileRefused(f"{path}: not base64: {error}") from error
            order = ExecRequest(exec_id=uuid.uuid4().hex, code=body.code, timeout_s=body.run_timeout, stdin=body.stdin)
            result = await _execute(pool, session, order, request, metrics)
            return _fusion_reply(result, await _fetched(pool, session, body.fetch_files))
        finally:
            pool.close_session(session)


async def _fetched(pool: Pool, session: Session, paths: Sequence[str]) -> dict[str, str]:
    """The files that exist, as base64. Raises FileRefused: hard links give one file many names, the sum is limited."""
    files, num_bytes = {}, 0
    for path in dict.fromkeys(paths):
        try:
            data = await pool.get_file(session, path)
        except FileRefused:
            continue  # as SandboxFusion: a file that is not there is left out
        num_bytes += len(data)
        if num_bytes > MAX_FETCHED_BYTES:
            raise FileRefused(f"fetch_files: more than {MAX_FETCHED_BYTES} bytes in sum; fetch fewer files")
        files[path] = base64.b64encode(data).decode()
    return files


def _fusion_reply(result: ExecResult, files: dict[str, str]) -> dict[str, Any]:
    is_infra = result.status in ("sandbox_error", "overloaded")
    run_status = {"ok": "Finished", "error": "Finished", "timeout": "TimeLimitExceeded"}.get(result.status, "Error")
    return_code = {"ok": result.exit_code or 0, "error": result.exit_code or 1}.get(result.status, result.exit_code)
    return {
        "status": "SandboxError" if is_infra else "Success" if result.status == "ok" else "Failed",
        "message": result.stderr if is_infra else "",
        "compile_result": None,
        "run_result": {
            "status": run_status,
            "execution_time": result.wall_s,
            "return_code": return_code,
            "stdout": result.stdout,
            "stderr": result.stderr + (result.traceback or ""),
        },
        "executor_pod_name": None,
        "files": files,
    }
