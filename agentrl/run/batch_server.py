"""The five HTTP routes between orchestrator and learner (see wire.py). Knows nothing of what a batch holds."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from agentrl.errors import AgentRLError, ConfigError, EngineError, LearnerReplaced, WeightsWanted
from agentrl.http import wire
from agentrl.http.body import BodyTooLarge, read_body
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024**2
DISCONNECT_S = 0.3  # the engine may hear of the learner's death a little earlier than we do


class RunOver(AgentRLError):
    """There will be no further batch."""


class LearnerPort(Protocol):
    """What the learner asks of the orchestrator."""

    async def next_batch(self, policy_version: int) -> Batch:
        """The batch to consume at this version. Raises RunOver, WeightsWanted."""
        ...

    async def step_done(self, output: StepOutput) -> None:
        """A step was made."""
        ...

    async def transfer_opened(self, init: TransferInit) -> None:
        """Returns once every engine joined the learner's group. Raises EngineError."""
        ...

    async def weights_published(self, ref: WeightsRef) -> None:
        """Returns once every engine holds the weights. Raises EngineError, WeightsWanted."""
        ...

    async def engine_failed(self, error: EngineError) -> None:
        """One of these two failed, and not because the learner went away."""
        ...

    async def finished(self) -> None:
        """The last weights were exported."""
        ...


class Door(Protocol):
    """Which process the learner is."""

    async def seat_of(self, learner_id: str) -> LearnerPort:
        """The port of this process, once the run is ready for it. Raises LearnerReplaced."""
        ...


def create_app(door: Door, *, token: str) -> FastAPI:
    """The app; every route wants `Authorization: Bearer TOKEN`. Raises ConfigError for an empty token."""
    if not token:
        raise ConfigError("the token between learner and orchestrator is empty: set AGENTRL_TOKEN")
    app = FastAPI(title="agentrl orchestrator", openapi_url=None)

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing token: learner and orchestrator need the same AGENTRL_TOKEN")

    async def port_of(request: Request) -> LearnerPort:
        try:
            return await door.seat_of(request.headers.get(wire.LEARNER_HEADER, ""))
        except LearnerReplaced as error:
            raise HTTPException(409, str(error)) from error

    @app.get(wire.BATCH)
    async def batch(request: Request, policy_version: int) -> Response:
        check(request)
        port = await port_of(request)
        try:
            async with asyncio.timeout(wire.LONG_POLL_S):
                return _packed(await port.next_batch(policy_version))
        except TimeoutError:
            return Response(status_code=204)
        except WeightsWanted:
            return Response(status_code=205)
        except RunOver:
            return Response(status_code=410)
        except LearnerReplaced as error:
            raise HTTPException(409, str(error)) from error

    @app.post(wire.STEP)
    async def step(request: Request) -> Response:
        check(request)
        output = _decoded(await _body(request), StepOutput)
        await (await port_of(request)).step_done(output)
        return Response(status_code=200)

    @app.post(wire.TRANSFER)
    async def transfer(request: Request) -> Response:
        check(request)
        init = _decoded(await _body(request), TransferInit)
        port = await port_of(request)
        async with _told_of_failures(port, request):
            await port.transfer_opened(init)
        return Response(status_code=200)

    @app.post(wire.WEIGHTS)
    async def weights(request: Request) -> Response:
        check(request)
        ref = _decoded(await _body(request), WeightsRef)
        port = await port_of(request)
        try:
            async with _told_of_failures(port, request):
                await port.weights_published(ref)
        except WeightsWanted:
            return Response(status_code=205)
        return Response(status_code=200)

    @app.post(wire.FINISHED)
    async def finished(request: Request) -> Response:
        check(request)
        await (await port_of(request)).finished()
        return Response(status_code=200)

    return app


@asynccontextmanager
async def _told_of_failures(port: LearnerPort, request: Request) -> AsyncIterator[None]:
    """A failure of the engine ends the run, unless the learner died in mid-transfer: then another takes its place."""
    try:
        yield
    except EngineError as error:
        await asyncio.sleep(DISCONNECT_S)
        if await request.is_disconnected():
            log.warning("the learner went away while its weights travelled: %s", error)
        else:
            await port.engine_failed(error)
        raise HTTPException(503, str(error)) from error


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request, limit_bytes=MAX_BODY_BYTES)
    except BodyTooLarge as error:
        raise HTTPException(413, str(error)) from error


def _packed(record: object) -> Response:
    return Response(content=wire.encode(record), media_type=wire.MEDIA_TYPE)


def _decoded(body: bytes, record_type: type[wire.T]) -> wire.T:
    try:
        return wire.decode(body, record_type)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(422, str(error)) from error


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
    task = asyncio.create_task(server.serve(sockets=[sock]), name="batch server")
    try:
        yield f"http://{host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(10):
                await task
        finally:
            sock.close()
