"""Serves chat sessions to OpenAI clients over loopback HTTP: an address and a key of its own for each episode.

    POST /SESSION/v1/chat/completions   one call; server-sent events with stream=true
    GET  /SESSION/v1/models             the one model

Knows HTTP and nothing of tokens or episodes. One server for all sessions runs while there is one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from agentrl.chat.openai_schema import (
    ApiError,
    ChatAnswer,
    ChatRequest,
    answer_body,
    answer_events,
    models_body,
    read_request,
)
from agentrl.env.agent_env import Endpoint
from agentrl.supervision.secrets import is_bearer
from agentrl.supervision.serving import BodyTooLarge, read_body, serving

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MODEL = "policy"
MAX_BODY_BYTES = 64 * 1024**2
# A connection serves one call: a kept one that the server closes just as the client writes would fail that call.
HEADERS = {"connection": "close"}
CLIENT_GONE = 499


class Chat(Protocol):
    """Whoever answers the calls of a session."""

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Raises ApiError."""
        ...


@dataclass(kw_only=True, eq=False)
class _Seat:
    """A session that is being served."""

    chat: Chat
    key: str
    calls: set[asyncio.Task[ChatAnswer]] = field(default_factory=set)


class ChatProxy:
    """Serves any number of sessions; the server starts with the first and stops with the last."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._told: set[str] = set()
        self._gate = asyncio.Lock()
        self._server = AsyncExitStack()
        self._url = ""

    @asynccontextmanager
    async def session(self, chat: Chat) -> AsyncIterator[Endpoint]:
        """Serve `chat` for the length of the block; calls that are still running when it is left are cancelled."""
        name, seat = secrets.token_hex(8), _Seat(chat=chat, key=f"sk-{secrets.token_urlsafe(24)}")
        self._seats[name] = seat
        try:
            url = await self._start()
            yield Endpoint(base_url=f"{url}/{name}/v1", api_key=seat.key, model=MODEL)
        finally:
            del self._seats[name]
            try:
                await _cancelled(seat.calls)
            finally:
                await self._stop_if_empty()

    async def _start(self) -> str:
        async with self._gate:
            if not self._url:
                self._url = await self._server.enter_async_context(serving(self._app(), host=HOST, port=0))
            return self._url

    async def _stop_if_empty(self) -> None:
        async with self._gate:
            if self._url and not self._seats:
                self._url = ""
                await self._server.aclose()

    def _app(self) -> FastAPI:
        app = FastAPI(title="agentrl chat", openapi_url=None)

        @app.exception_handler(ApiError)
        async def refused(request: Request, error: ApiError) -> Response:
            return JSONResponse(error.body(), status_code=error.status, headers=HEADERS)

        @app.post("/{name}/v1/chat/completions")
        async def completions(name: str, request: Request) -> Response:
            seat = self._seat(name, request)
            asked = read_request(await _body(request))
            self._seat(name, request)  # the session may have ended while the body was on its way
            self._tell(asked)
            answer = await _unless_client_gone(request, asyncio.ensure_future(seat.chat.answer(asked)), seat.calls)
            if answer is None:
                return Response(status_code=CLIENT_GONE)
            if not asked.stream:
                return JSONResponse(answer_body(answer, model=MODEL), headers=HEADERS)
            events = answer_events(answer, model=MODEL, include_usage=asked.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)

        @app.get("/{name}/v1/models")
        async def models(name: str, request: Request) -> Response:
            self._seat(name, request)
            return JSONResponse(models_body(MODEL), headers=HEADERS)

        @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        async def other(path: str, request: Request) -> Response:
            raise ApiError(
                404,
                f"{request.method} /{path.partition('/')[2]} is not served: only POST /v1/chat/completions and "
                "GET /v1/models are; set the client to chat completions",
                code="unknown_url",
            )

        return app

    def _seat(self, name: str, request: Request) -> _Seat:
        seat = self._seats.get(name)
        if seat is None or not is_bearer(request.headers.get("authorization", ""), seat.key):
            raise _over()
        return seat

    def _tell(self, asked: ChatRequest) -> None:
        for name in asked.overruled:
            if name not in self._told:
                self._told.add(name)
                log.warning("an agent sets %r: not obeyed, the run's own sampling rules hold", name)


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request, limit_bytes=MAX_BODY_BYTES)
    except BodyTooLarge as error:
        raise ApiError(413, str(error)) from error


async def _unless_client_gone(
    request: Request, call: asyncio.Task[ChatAnswer], calls: set[asyncio.Task[ChatAnswer]]
) -> ChatAnswer | None:
    """What `call` comes to; None when the client hangs up, by which it is cancelled. In `calls` meanwhile.

    Raises ApiError, also when somebody else cancels the call: its session is over then.
    """
    calls.add(call)
    gone = asyncio.ensure_future(request.receive())  # after the body, the only message is the disconnection
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        if call.cancelled():
            raise _over()
        return call.result() if call.done() else None
    finally:
        calls.discard(call)
        await _cancelled({call, gone})


def _over() -> ApiError:
    return ApiError(401, "no such session, or not its key: the episode may be over", code="invalid_api_key")


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel and see them end; what they came to is nobody's concern any more."""
    for task in (tasks := list(tasks)):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
