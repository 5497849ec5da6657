"""The HTTP API between orchestrator and learner: its contract and its six routes.

    GET  /v1/batch?policy_version=V&num_known=N
                                      -> 200 Batch | 204 not yet, ask again | 205 publish V again | 410 the run is over
    POST /v1/step      StepOutput     -> 200
    GET  /v1/receivers?policy_version=V -> 200 Receivers: the engines that will take V from the learner's group
    POST /v1/transfer  TransferInit   -> 200 once they all joined the learner's group | 205 publish again
    POST /v1/weights   WeightsRef     -> 200 once every engine holds them and has proven it | 205 publish again
    POST /v1/finished                 -> 200 after 410: the last weights are in the run's folder

Bodies are msgpack and are decoded into typed records only. Every call carries the header x-agentrl-learner: an id that
each learner process makes up. A new id means that the learner was restarted: its first call waits until the run has
gone back to the version of that learner; the process that it replaced gets 409. Repeating any call is safe: the same
version gets the same batch until its step was reported. 205 is the answer after an engine was restarted, or a transfer
broke off, and only the learner can give it the current weights: it opens its transfer again and publishes them again.

With learner.stream_groups a batch comes in parts. A part has the groups that have finished by then, without the first
N, which the learner got before; their order does not change. `Batch.num_missing` is 0 in the last part.

`learner_session.py` answers the calls. Independent of the buffer and the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from agentrl.engine.base import Receivers
from agentrl.errors import ConfigError, EngineError, LearnerReplaced, RunOver, WeightsWanted
from agentrl.supervision.serving import read_record, requires_token
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef

log = logging.getLogger(__name__)

T = TypeVar("T")

MEDIA_TYPE = "application/msgpack"
BATCH, STEP, TRANSFER, WEIGHTS = "/v1/batch", "/v1/step", "/v1/transfer", "/v1/weights"
RECEIVERS, FINISHED = "/v1/receivers", "/v1/finished"
LEARNER_HEADER = "x-agentrl-learner"
LONG_POLL_S = 10.0
MAX_BODY_BYTES = 64 * 1024**2
WRONG_TOKEN = "wrong or missing token: learner and orchestrator need the same AGENTRL_TOKEN"
DISCONNECT_S = 0.3  # the engine may notice the learner's death a little earlier than the server does


def encode(record: Any) -> bytes:
    """A frozen record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """msgpack into `record_type`. Raises msgspec.ValidationError when a field is missing or of another type."""
    return msgspec.msgpack.decode(data, type=record_type)


class LearnerCalls(Protocol):
    """The calls of one learner process, as the routes pass them on. `LearnerSession` answers them in a run.

    Example: `POST /v1/step` with a StepOutput becomes `await session.step_done(output)`.
    """

    async def next_batch(self, policy_version: int, num_known: int) -> Batch:
        """The batch to consume at this version, or a part of it, without the first `num_known` groups.

        Raises RunOver, WeightsWanted, LearnerReplaced.
        """
        ...

    async def step_done(self, output: StepOutput) -> None:
        """Report a step."""
        ...

    async def receivers(self, policy_version: int) -> Receivers:
        """The engines that will take this version from the learner's group. Raises EngineError."""
        ...

    async def transfer_opened(self, init: TransferInit) -> None:
        """Return once they all joined the learner's group. Raises EngineError, WeightsWanted."""
        ...

    async def weights_published(self, ref: WeightsRef) -> None:
        """Return once every engine holds the weights. Raises EngineError, WeightsWanted."""
        ...

    async def engine_failed(self, error: EngineError) -> None:
        """One of the three calls above failed, and not because the learner went away."""
        ...

    async def finished(self) -> None:
        """The last weights were exported."""
        ...


class SessionOf(Protocol):
    """Finds the session of a learner process. Example: `LearnerSessions`, in a run."""

    async def session_of(self, learner_id: str) -> LearnerCalls:
        """The session of this process, once the run is ready for it. Raises LearnerReplaced."""
        ...


def create_app(sessions: SessionOf, *, token: str) -> FastAPI:
    """The app; every route requires `Authorization: Bearer TOKEN`. Raises ConfigError for an empty token."""
    if not token:
        raise ConfigError("the token between learner and orchestrator is empty: set AGENTRL_TOKEN")
    app = FastAPI(
        title="agentrl orchestrator", openapi_url=None, dependencies=[Depends(requires_token(token, WRONG_TOKEN))]
    )
    app.add_exception_handler(LearnerReplaced, _conflict)
    app.add_exception_handler(WeightsWanted, _publish_again)

    async def session_of(request: Request) -> LearnerCalls:
        return await sessions.session_of(request.headers.get(LEARNER_HEADER, ""))

    @app.get(BATCH)
    async def batch(request: Request, policy_version: int, num_known: int = 0) -> Response:
        session = await session_of(request)
        try:
            async with asyncio.timeout(LONG_POLL_S):
                record = await session.next_batch(policy_version, num_known)
        except TimeoutError:
            return Response(status_code=204)
        except RunOver:
            return Response(status_code=410)
        return Response(content=encode(record), media_type=MEDIA_TYPE)

    @app.post(STEP)
    async def step(request: Request) -> None:
        output = await _record(request, StepOutput)
        await (await session_of(request)).step_done(output)

    @app.get(RECEIVERS)
    async def receivers(request: Request, policy_version: int) -> Response:
        session = await session_of(request)
        async with _reporting_failures(session, request):
            return Response(content=encode(await session.receivers(policy_version)), media_type=MEDIA_TYPE)

    @app.post(TRANSFER)
    async def transfer(request: Request) -> None:
        init = await _record(request, TransferInit)
        session = await session_of(request)
        async with _reporting_failures(session, request):
            await session.transfer_opened(init)

    @app.post(WEIGHTS)
    async def weights(request: Request) -> None:
        ref = await _record(request, WeightsRef)
        session = await session_of(request)
        async with _reporting_failures(session, request):
            await session.weights_published(ref)

    @app.post(FINISHED)
    async def finished(request: Request) -> None:
        await (await session_of(request)).finished()

    return app


async def _conflict(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=409)


async def _publish_again(request: Request, error: Exception) -> Response:
    return Response(status_code=205)


@asynccontextmanager
async def _reporting_failures(session: LearnerCalls, request: Request) -> AsyncIterator[None]:
    """A failure of the engine ends the run, unless the learner died during the transfer: then another replaces it."""
    try:
        yield
    except EngineError as error:
        await asyncio.sleep(DISCONNECT_S)
        if await request.is_disconnected():
            log.warning("the learner went away during its weight transfer: %s", error)
        else:
            await session.engine_failed(error)
        raise HTTPException(503, str(error)) from error


async def _record(request: Request, record_type: type[T]) -> T:
    return await read_record(request, record_type, limit_bytes=MAX_BODY_BYTES)
