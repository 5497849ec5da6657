"""The HTTP API between orchestrator and rollout workers: its routes.

    GET  /v1/workers/run                          -> 200 RunInfo
    POST /v1/workers/join            Joining      -> 200 Joined
    POST /v1/workers/orders          Report       -> 200 Orders, at the latest after 2 s; also a sign of life
    POST /v1/workers/alive           Alive        -> 200; from a worker that moves, but is too busy to ask for orders
    POST /v1/workers/result          Result       -> 200
    POST /v1/workers/engine-failure  EngineFailure -> 200
    POST /v1/workers/leave           Leaving      -> 200

Work is pulled: nobody has to reach a worker, which may be behind NAT, and a worker that takes no orders gets no work.
Bodies are msgpack, have a limit, and are decoded into typed records only. Repeating any call is safe. 409: the worker
was given up and must join again; 410: the run is over.

`dispatcher.py` answers the calls. Independent of engines and of how groups are played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from agentrl.errors import ConfigError, RunOver, WorkerExpired
from agentrl.supervision.serving import read_record, requires_token
from agentrl.workers.dispatcher import Dispatcher
from agentrl.workers.records import (
    ALIVE,
    ENGINE_FAILURE,
    JOIN,
    LEAVE,
    MEDIA_TYPE,
    ORDERS,
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
    encode,
)

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 1024**2
WRONG_TOKEN = "wrong or missing token: rollout workers and orchestrator need one AGENTRL_TOKEN"


def create_app(
    dispatcher: Dispatcher, info: RunInfo, *, token: str, sandbox_url: Callable[[], str] | None = None
) -> FastAPI:
    """The app; every route requires `Authorization: Bearer TOKEN`. Raises ConfigError for an empty token.

    `sandbox_url` gives the sandbox's address now, where it may change; None: that of `info` stays.
    """
    if not token:
        raise ConfigError("the token between orchestrator and rollout workers is empty: set AGENTRL_TOKEN")
    app = FastAPI(
        title="agentrl rollout workers", openapi_url=None, dependencies=[Depends(requires_token(token, WRONG_TOKEN))]
    )
    app.add_exception_handler(WorkerExpired, _expired)
    app.add_exception_handler(RunOver, _over)

    @app.get(RUN)
    async def run() -> Response:
        return _reply(info if sandbox_url is None else replace(info, sandbox_url=sandbox_url()))

    @app.post(JOIN)
    async def join(request: Request) -> Response:
        return _reply(Joined(lease=dispatcher.join(await _record(request, Joining))))

    @app.post(ORDERS)
    async def orders(request: Request) -> Response:
        report = await _record(request, Report)
        found = await _unless_disconnected(request, dispatcher.orders(report))
        if found is None:
            dispatcher.disconnected(report.lease)
            return Response(status_code=204)  # nobody reads it
        return _reply(found if sandbox_url is None else replace(found, sandbox_url=sandbox_url()))

    @app.post(ALIVE)
    async def alive(request: Request) -> None:
        dispatcher.alive((await _record(request, Alive)).lease)

    @app.post(RESULT)
    async def result(request: Request) -> None:
        dispatcher.result(await _record(request, Result))

    @app.post(ENGINE_FAILURE)
    async def engine_failure(request: Request) -> None:
        dispatcher.engine_failed(await _record(request, EngineFailure))

    @app.post(LEAVE)
    async def leave(request: Request) -> None:
        leaving = await _record(request, Leaving)
        dispatcher.leave(leaving.lease, leaving.reason)

    return app


async def _unless_disconnected(request: Request, orders: Awaitable[Orders]) -> Orders | None:
    """The orders; None when the worker's connection breaks before there are any."""
    answer, broken = asyncio.ensure_future(orders), asyncio.create_task(_broken(request), name="connection of a worker")
    try:
        await asyncio.wait({answer, broken}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        for task in (answer, broken):
            task.cancel()
            with suppress(asyncio.CancelledError, WorkerExpired, RunOver):
                await task


async def _broken(request: Request) -> None:
    """Return when the connection breaks. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(record: Any) -> Response:
    return Response(content=encode(record), media_type=MEDIA_TYPE)


async def _expired(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=409)


async def _over(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=410)


async def _record(request: Request, record_type: type[T]) -> T:
    return await read_record(request, record_type, limit_bytes=MAX_BODY_BYTES)
