"""The five HTTP routes between orchestrator and learner (see wire.py). Knows nothing of what a batch holds."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from agentrl.errors import AgentRLError, ConfigError, EngineError, LearnerReplaced, WeightsWanted
from agentrl.supervision.http_body import BodyTooLarge, read_body
from agentrl.train import learner_schema as wire
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
    app = FastAPI(title="agentrl orchestrator", openapi_url=None, dependencies=[Depends(_bearer(token))])
    app.add_exception_handler(LearnerReplaced, _turned_away)

    async def port_of(request: Request) -> LearnerPort:
        return await door.seat_of(request.headers.get(wire.LEARNER_HEADER, ""))

    @app.get(wire.BATCH)
    async def batch(request: Request, policy_version: int) -> Response:
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

    @app.post(wire.STEP)
    async def step(request: Request) -> Response:
        output = await _record(request, StepOutput)
        await (await port_of(request)).step_done(output)
        return Response(status_code=200)

    @app.post(wire.TRANSFER)
    async def transfer(request: Request) -> Response:
        init = await _record(request, TransferInit)
        port = await port_of(request)
        async with _told_of_failures(port, request):
            await port.transfer_opened(init)
        return Response(status_code=200)

    @app.post(wire.WEIGHTS)
    async def weights(request: Request) -> Response:
        ref = await _record(request, WeightsRef)
        port = await port_of(request)
        try:
            async with _told_of_failures(port, request):
                await port.weights_published(ref)
        except WeightsWanted:
            return Response(status_code=205)
        return Response(status_code=200)

    @app.post(wire.FINISHED)
    async def finished(request: Request) -> Response:
        await (await port_of(request)).finished()
        return Response(status_code=200)

    return app


def _bearer(token: str) -> Callable[[Request], Awaitable[None]]:
    """What every route asks first."""

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing token: learner and orchestrator need the same AGENTRL_TOKEN")

    return check


async def _turned_away(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=409)


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


def _packed(record: object) -> Response:
    return Response(content=wire.encode(record), media_type=wire.MEDIA_TYPE)


async def _record(request: Request, record_type: type[wire.T]) -> wire.T:
    """The body, as the record it must be."""
    try:
        return wire.decode(await read_body(request, limit_bytes=MAX_BODY_BYTES), record_type)
    except BodyTooLarge as error:
        raise HTTPException(413, str(error)) from error
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(422, str(error)) from error
