"""Serves chat sessions to OpenAI clients over loopback HTTP; each episode has its own address and key.

    POST /SESSION/v1/chat/completions   one call; server-sent events with stream=true
    GET  /SESSION/v1/models             the one model

One server for all sessions runs while there is a session. Independent of tokens and episodes.
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
# A connection serves one call: the server could close a kept connection just as the client writes the next call.
HEADERS = {"connection": "close"}
CLIENT_GONE = 499


class Chat(Protocol):
    """Answers the calls of one session, such as a ChatSession."""

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Raises ApiError."""
        ...


@dataclass(kw_only=True, eq=False)
class _ServedSession:
    """A session that is being served."""

    chat: Chat
    key: str
    calls: set[asyncio.Task[ChatAnswer]] = field(default_factory=set)


class ChatProxy:
    """Serves any number of sessions; the server starts with the first and stops with the last.

    async with ChatProxy().session(session) as endpoint:
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _ServedSession] = {}
        self._reported: set[str] = set()
        self._gate = asyncio.Lock()
        self._server = AsyncExitStack()
        self._url = ""

    @asynccontextmanager
    async def session(self, chat: Chat) -> AsyncIterator[Endpoint]:
        """Serve `chat` within the block; calls that still run at its end are cancelled."""
        name, served = secrets.token_hex(8), _ServedSession(chat=chat, key=f"sk-{secrets.token_urlsafe(24)}")
        self._sessions[name] = served
        try:
            url = await self._start()
            yield Endpoint(base_url=f"{url}/{name}/v1", api_key=served.key, model=MODEL)
        finally:
            del self._sessions[name]
            try:
                await _cancelled(served.calls)
            finally:
                await self._stop_if_empty()

    async def _start(self) -> str:
        async with self._gate:
            if not self._url:
                self._url = await self._server.enter_async_context(serving(self._app(), host=HOST, port=0))
            return self._url

    async def _stop_if_empty(self) -> None:
        async with self._gate:
            if self._url and not self._sessions:
                self._url = ""
                await self._server.aclose()

    def _app(self) -> FastAPI:
        app = FastAPI(title="agentrl chat", openapi_url=None)

        @app.exception_handler(ApiError)
        async def refused(request: Request, error: ApiError) -> Response:
            return JSONResponse(error.body(), status_code=error.status, headers=HEADERS)

        @app.post("/{name}/v1/chat/completions")
        async def completions(name: str, request: Request) -> Response:
            served = self._served(name, request)
            asked = read_request(await _body(request))
            self._served(name, request)  # the session may have ended while the body was on its way
            self._report_overruled(asked)
            answer = await _unless_client_gone(request, asyncio.ensure_future(served.chat.answer(asked)), served.calls)
            if answer is None:
                return Response(status_code=CLIENT_GONE)
            if not asked.stream:
                return JSONResponse(answer_body(answer, model=MODEL), headers=HEADERS)
            events = answer_events(answer, model=MODEL, include_usage=asked.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)

        @app.get("/{name}/v1/models")
        async def models(name: str, request: Request) -> Response:
            self._served(name, request)
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

    def _served(self, name: str, request: Request) -> _ServedSession:
        served = self._sessions.get(name)
        if served is None or not is_bearer(request.headers.get("authorization", ""), served.key):
            raise _over()
        return served

    def _report_overruled(self, asked: ChatRequest) -> None:
        for name in asked.overruled:
            if name not in self._reported:
                self._reported.add(name)
                log.warning("an agent sets %r: not obeyed, the run's own sampling rules hold", name)


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request, limit_bytes=MAX_BODY_BYTES)
    except BodyTooLarge as error:
        raise ApiError(413, str(error)) from error


async def _unless_client_gone(
    request: Request, call: asyncio.Task[ChatAnswer], calls: set[asyncio.Task[ChatAnswer]]
) -> ChatAnswer | None:
    """The result of `call`; None when the client disconnects, which cancels it. It is in `calls` meanwhile.

    Raises ApiError, also when the call is cancelled because its session ended.
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
    """Cancel tasks, wait for their end and ignore their results."""
    for task in (tasks := list(tasks)):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
