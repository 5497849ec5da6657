"""The HTTP API between orchestrator and learner: its contract, the session of one learner process, and the six routes.

    GET  /v1/batch?policy_version=V   -> 200 Batch | 204 not yet, ask again | 205 publish V again | 410 the run is over
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

Independent of the buffer and the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.engine.metered import MeteredEngine
from agentrl.errors import AgentRLError, ConfigError, EngineError, LearnerError, LearnerReplaced, WeightsWanted
from agentrl.supervision.secrets import is_bearer
from agentrl.supervision.serving import BodyTooLarge, read_body
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef

log = logging.getLogger(__name__)

T = TypeVar("T")

MEDIA_TYPE = "application/msgpack"
BATCH, STEP, TRANSFER, WEIGHTS = "/v1/batch", "/v1/step", "/v1/transfer", "/v1/weights"
RECEIVERS, FINISHED = "/v1/receivers", "/v1/finished"
LEARNER_HEADER = "x-agentrl-learner"
LONG_POLL_S = 10.0
MAX_BODY_BYTES = 64 * 1024**2
DISCONNECT_S = 0.3  # the engine may notice the learner's death a little earlier than the server does


def encode(record: Any) -> bytes:
    """A frozen record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """msgpack into `record_type`. Raises msgspec.ValidationError when a field is missing or of another type."""
    return msgspec.msgpack.decode(data, type=record_type)


class RunOver(AgentRLError):
    """There is no further batch: the learner exports its weights and ends. Example: `raise RunOver` gives 410."""


class LearnerCalls(Protocol):
    """The calls of one learner process, as the routes pass them on. `LearnerSession` answers them in a run.

    Example: `POST /v1/step` with a StepOutput becomes `await session.step_done(output)`.
    """

    async def next_batch(self, policy_version: int) -> Batch:
        """The batch to consume at this version. Raises RunOver, WeightsWanted, LearnerReplaced."""
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


class LearnerSession:
    """One connected learner process: the training loop offers it a batch, gets a step and then the new weights.

    A repeated call of the learner gets the same answer as the first one, so a lost reply costs nothing. The session
    also measures for how much of the learner's working time the engine generated.

    Example:
        output = await session.train(batch, within_s=600)  # the learner fetched the batch and reported its step
        ref = await session.weights(within_s=600)  # every engine holds the new weights
    """

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Condition()
        self._batch: Batch | None = None
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._refs: asyncio.Queue[WeightsRef | EngineError] = asyncio.Queue()
        self._published_version = -1
        self._over = False
        self._finished = asyncio.Event()
        self._is_closed = False
        self._handed_out: tuple[float, float] | None = None  # clock, engine-busy seconds
        self._work_s = 0.0
        self._overlap_s = 0.0
        self.made_version = -1
        """Newest version that the learner has reported."""
        self.last_update: WeightUpdate | None = None
        """Duration and proof of the last weight update."""

    # Called by the training loop.

    async def train(self, batch: Batch, *, within_s: float) -> StepOutput:
        """Offer `batch` and wait for its step. Raises LearnerError past the deadline."""
        async with self._changed:
            self._batch = batch
            self._handed_out = None
            self._changed.notify_all()
        return await _within(self._outputs.get(), within_s, f"step {batch.policy_version + 1}")

    async def weights(self, *, within_s: float) -> WeightsRef:
        """Wait until every engine holds the next version. Raises LearnerError past the deadline, or the failure."""
        ref = await _within(self._refs.get(), within_s, "its weights")
        if isinstance(ref, EngineError):
            raise ref
        return ref

    async def finish(self) -> None:
        """Tell the learner that there is no further batch."""
        async with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether the learner has nothing left to do."""
        return self._finished.is_set()

    async def exported(self, *, within_s: float) -> None:
        """After `finish`: wait until the learner has exported its weights. Raises LearnerError."""
        await _within(self._finished.wait(), within_s, "its last export")

    async def close(self) -> None:
        """The run has ended, also by an error: a learner that waits for a batch gets 409 and exports nothing."""
        self._is_closed = True
        await self.finish()

    @property
    def overlap(self) -> float:
        """Share of the learner's working time during which the engine generated."""
        return self._overlap_s / self._work_s if self._work_s else 0.0

    # Called by the routes: see LearnerCalls.

    async def next_batch(self, policy_version: int) -> Batch:
        """Wait for the batch to consume at `policy_version`. Raises RunOver, WeightsWanted, LearnerReplaced."""
        if self._engine.wants_weights:
            raise WeightsWanted
        async with self._changed:
            with self._engine.wait_graph.waiting("learner", on="training loop", what="a batch", moves=False):
                await self._changed.wait_for(
                    lambda: self._over or (self._batch is not None and self._batch.policy_version == policy_version)
                )
            if self._is_closed:
                raise LearnerReplaced("the run has ended")
            if self._over or self._batch is None:
                raise RunOver
            self._handed_out = self._handed_out or (time.monotonic(), self._engine.busy.seconds)
            return self._batch

    async def step_done(self, output: StepOutput) -> None:
        """Pass the step on to `train`; a repeated report is ignored."""
        if self._batch is None or output.policy_version != self._batch.policy_version + 1:
            return
        if self._handed_out is not None:
            since, busy_s = self._handed_out
            self._work_s += time.monotonic() - since
            self._overlap_s += self._engine.busy.seconds - busy_s
        self._batch = None
        self.made_version = output.policy_version
        self._outputs.put_nowait(output)

    async def receivers(self, policy_version: int) -> Receivers:
        """Which engines the learner's next group consists of. Raises EngineError."""
        return await self._engine.receivers(policy_version)

    async def transfer_opened(self, init: TransferInit) -> None:
        """Let the engine join the learner's group. Raises EngineError."""
        await self._engine.init_transfer(init)

    async def weights_published(self, ref: WeightsRef) -> None:
        """Put the weights into the engine. Raises EngineError; WeightsWanted where it was restarted meanwhile."""
        if ref.policy_version <= self._published_version and not self._engine.wants_weights:
            return
        self.last_update = await self._engine.update_weights(ref)
        if ref.policy_version > self._published_version:  # a repeated call may have waited for the same update
            self._published_version = ref.policy_version
            self._refs.put_nowait(ref)

    async def engine_failed(self, error: EngineError) -> None:
        """The engine did not take the weights: `weights` raises this error, which ends the run."""
        self._refs.put_nowait(error)

    async def finished(self) -> None:
        """The final weights are in the run's folder."""
        self._finished.set()


class LearnerSessions:
    """Tracks which learner process is connected. A restarted learner replaces the previous one.

    A restarted process stands at an older version than the run. It is let in only when the run's loop has begun again,
    from the journal, with a new session; from then on the process that it replaced is refused.

    Example:
        session = await sessions.open()  # for the process that connects next
        await sessions.replaced()  # raises LearnerReplaced when another process connects: open a new session
    """

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Condition()
        self._session: LearnerSession | None = None
        self._connected: str | None = None
        self._waiting: str | None = None
        self._replaced: set[str] = set()
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether the learner has nothing left to do. A process that ends earlier has died."""
        return self._session is not None and self._session.is_done

    async def open(self) -> LearnerSession:
        """A new session, for the learner that waits or for the next one that connects."""
        async with self._changed:
            if self._connected is not None:
                self._replaced.add(self._connected)
            self._session, self._connected = LearnerSession(self._engine), None
            self._changed.notify_all()
            return self._session

    async def replaced(self) -> None:
        """Wait until another learner process connects, then raise LearnerReplaced."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting is not None)
        raise LearnerReplaced("the learner was restarted")

    async def close(self) -> None:
        """The run has ended: refuse every learner that waits."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._session is not None:
            await self._session.close()

    async def session_of(self, learner_id: str) -> LearnerSession:
        """The session of this process; waits for one. Raises LearnerReplaced for a process that was replaced."""
        async with self._changed:
            while learner_id not in self._replaced and not self._is_closed:
                if self._session is not None and self._connected in (None, learner_id):
                    self._connected, self._waiting = learner_id, None
                    return self._session
                self._waiting = learner_id
                self._changed.notify_all()
                await self._changed.wait()
        raise LearnerReplaced("the run has ended" if self._is_closed else "another learner has taken over this run")


def create_app(sessions: SessionOf, *, token: str) -> FastAPI:
    """The app; every route requires `Authorization: Bearer TOKEN`. Raises ConfigError for an empty token."""
    if not token:
        raise ConfigError("the token between learner and orchestrator is empty: set AGENTRL_TOKEN")
    app = FastAPI(title="agentrl orchestrator", openapi_url=None, dependencies=[Depends(_bearer(token))])
    app.add_exception_handler(LearnerReplaced, _conflict)
    app.add_exception_handler(WeightsWanted, _publish_again)

    async def session_of(request: Request) -> LearnerCalls:
        return await sessions.session_of(request.headers.get(LEARNER_HEADER, ""))

    @app.get(BATCH)
    async def batch(request: Request, policy_version: int) -> Response:
        session = await session_of(request)
        try:
            async with asyncio.timeout(LONG_POLL_S):
                record = await session.next_batch(policy_version)
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


def _bearer(token: str) -> Callable[[Request], Awaitable[None]]:
    """The check that runs before every route."""

    async def check(request: Request) -> None:
        if not is_bearer(request.headers.get("authorization", ""), token):
            raise HTTPException(401, "wrong or missing token: learner and orchestrator need the same AGENTRL_TOKEN")

    return check


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
    """The body, decoded into the record that the route takes."""
    try:
        return decode(await read_body(request, limit_bytes=MAX_BODY_BYTES), record_type)
    except BodyTooLarge as error:
        raise HTTPException(413, str(error)) from error
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(422, str(error)) from error


async def _within(waiting: Awaitable[T], seconds: float, what: str) -> T:
    try:
        async with asyncio.timeout(seconds):  # asyncio.wait_for can swallow a cancellation
            return await waiting
    except TimeoutError as error:
        raise LearnerError(f"the learner did not deliver {what} within {seconds:g} s; see logs/learner.log") from error
