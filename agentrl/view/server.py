"""Serves the page, its documents, and a stream of what changed, on this machine.

On loopback there is no secret, as elsewhere in the project, but only addresses of this machine are answered, so that no
other site in the browser can ask by a name of its own. Elsewhere AGENTRL_TOKEN is required. It only reads.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import quote, urlsplit

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from agentrl.supervision.secrets import is_bearer, is_loopback
from agentrl.view import shell
from agentrl.view.documents import Documents
from agentrl.view.run_reader import RunReader

LOOK_EVERY_S = 1.0
COOKIE = "agentrl_view"
_TYPES = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_JSON = "application/json"


def create_app(documents: Documents, *, token: str | None, look_every_s: float = LOOK_EVERY_S) -> FastAPI:
    """The app. `token`: what a browser must bring, once, as ?token=TOKEN; None: only callers by loopback names.

    Example:
        async with serving(create_app(documents, token=None), host="127.0.0.1", port=0) as url: ...
    """
    app = FastAPI(title="agentrl view", docs_url=None, redoc_url=None, openapi_url=None)
    lock = asyncio.Lock()  # readers are not made for two threads

    @app.middleware("http")
    async def guarded(request: Request, call_next: Callable[[Request], object]) -> Response:
        response = _refusal(request, token) or await call_next(request)  # type: ignore[misc]
        assert isinstance(response, Response)
        response.headers.update(_HEADERS)
        return response

    @app.get("/")
    async def index() -> Response:
        policy = shell.policy(script="'self'", style="'self'", connect="'self'")
        page = shell.page_beside_files(source="server")
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/{name}.{kind}")
    async def part(name: str, kind: str) -> Response:
        try:
            return Response(shell.file(f"{name}.{kind}"), media_type=_TYPES[kind])
        except KeyError:
            return PlainTextResponse("there is no such file", 404)

    @app.get("/doc/{name:path}")
    async def document(name: str) -> Response:
        try:
            async with lock:
                return Response(await to_thread.run_sync(documents.make, name), media_type=_JSON)
        except KeyError as error:
            return PlainTextResponse(str(error.args[0]), 404)

    @app.get("/events")
    async def events(request: Request) -> Response:
        return StreamingResponse(_changes(documents, look_every_s), media_type="text/event-stream")

    return app


async def _changes(documents: Documents, every_s: float) -> AsyncIterator[str]:
    """An event for each run whose files changed. Ends when the browser goes away, which cancels it."""
    before = {key: _stamp(reader) for key, reader in documents.readers.items()}
    yield "retry: 2000\n\n"
    while True:
        await asyncio.sleep(every_s)
        now = {key: await to_thread.run_sync(_stamp, reader) for key, reader in documents.readers.items()}
        for key, stamp in now.items():
            if stamp != before[key]:
                yield f"event: changed\ndata: {json.dumps({'run': key})}\n\n"
        before = now


def _stamp(reader: RunReader) -> Mapping[str, tuple[int, int]]:
    """Changes when there is something new to see."""
    run = reader.run
    found = {}
    for path in (run.metrics, run.trajectories, run.config):
        try:
            stat = path.stat()
        except OSError:
            continue
        found[path.name] = (stat.st_mtime_ns, stat.st_size)
    status = reader.status()
    return found | {"state": (hash(status.state) if status else 0, 0)}


def _refusal(request: Request, token: str | None) -> Response | None:
    """Why a request is not answered, or the redirect that keeps its token; None where it is answered."""
    if token is None:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if not is_loopback(host):
            return PlainTextResponse("this server answers to 127.0.0.1 and localhost only", 403)
        return None
    given = request.query_params.get("token", "")
    if hmac.compare_digest(given.encode(), token.encode()):
        response = RedirectResponse("/" if request.url.path == "/" else request.url.path)
        response.set_cookie(COOKIE, quote(token, safe=""), httponly=True, samesite="strict")
        return response
    kept = request.cookies.get(COOKIE, "")
    if hmac.compare_digest(kept.encode(), quote(token, safe="").encode()):
        return None
    if is_bearer(request.headers.get("authorization", ""), token):
        return None
    return PlainTextResponse("open this page with ?token=TOKEN, the value of AGENTRL_TOKEN", 401)
