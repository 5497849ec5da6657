"""One address for several sandbox services: `python -m sandbox.gateway --to sandbox:8321`.

A session stays with the replica that opened it. The session's id carries the replica's address, so the gateway has no
state and may be restarted at any time. Replicas are the addresses that the name resolves to now. The services check
tokens; the gateway does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import ipaddress
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp
from aiohttp import web
from yarl import URL

from sandbox.protocol import MAX_SESSION_BODY_BYTES, Health, SessionReply

CONNECT_DEADLINE_S = 5.0
KEEPALIVE_S = 2.0  # shorter than the services' 5 s, so that this side closes idle connections first
OPEN, SESSIONS = "/v1/sessions", "/v1/sessions/"
FULL = (429, 503)  # another replica may have room
PASSED_ON = ("authorization", "content-type", "content-length")
LOST = "no such session: the replica that held it is gone"

Resolve = Callable[[], Awaitable[Sequence[str]]]


class Gateway:
    """Forwards requests to replicas.

    Args:
        resolve: returns the current addresses of the replicas. Raises OSError.
        port: the port of all replicas.

    Example: `await serve(Gateway(resolver("sandbox", 8321), 8321), host="0.0.0.0", port=8320)`.
    """

    def __init__(self, resolve: Resolve, port: int) -> None:
        self._resolve = resolve
        self._port = port
        self._http: aiohttp.ClientSession

    def app(self) -> web.Application:
        """The application. Serve it with `handler_cancellation`, so that a client that disconnects ends its request."""
        app = web.Application(
            client_max_size=MAX_SESSION_BODY_BYTES
        )  # of bodies that are read here; others pass through
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post(OPEN, self._open_session)
        app.router.add_route("*", SESSIONS + "{rest:.*}", self._of_session)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            auto_decompress=False,
        ) as self._http:
            yield

    async def _open_session(self, request: web.Request) -> web.Response:
        """Open a session at the first replica with room. A call that is repeated starts at the same replica."""
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body of this call has at most {MAX_SESSION_BODY_BYTES} bytes"
            return web.json_response({"error": "too_large", "message": message}, status=413)
        key = _idempotency_key(body) or random.randbytes(8).hex()
        ranked = sorted(await self._replicas(), key=lambda address: hashlib.sha256((address + key).encode()).digest())
        answer = _unavailable("no replica of the sandbox can be found")
        for address in ranked:
            answer = await self._passed(request, address, request.rel_url, body)
            if answer.status == 200:
                reply = SessionReply.model_validate_json(_bytes(answer))
                marked = f"{reply.session_id}.{ipaddress.ip_address(address).packed.hex()}"
                return web.json_response(
                    body=reply.model_copy(update={"session_id": marked}).model_dump_json().encode()
                )
            if answer.status not in FULL:
                break
        return answer

    async def _of_session(self, request: web.Request) -> web.Response:
        marked, slash, rest = request.rel_url.raw_path.removeprefix(SESSIONS).partition("/")
        session_id, _, mark = marked.rpartition(".")
        address = _address(mark)
        if address is None or address not in await self._replicas():
            return web.json_response({"error": "session_lost", "message": LOST}, status=404)
        target = URL(f"{SESSIONS}{session_id}{slash}{rest}", encoded=True)
        return await self._passed(request, address, target, _body(request))

    async def _any(self, request: web.Request) -> web.Response:
        """Forward a call without a session to any replica."""
        replicas = await self._replicas()
        if not replicas:
            return _unavailable("no replica of the sandbox can be found")
        return await self._passed(request, random.choice(replicas), request.rel_url, _body(request))

    async def _metrics(self, request: web.Request) -> web.Response:
        """Metrics of the only replica. Those of several replicas cannot be added up here."""
        if len(await self._replicas()) > 1:
            raise web.HTTPNotFound(text=f"there are several replicas: ask each for its own, port {self._port}\n")
        return await self._any(request)

    async def _health(self, request: web.Request) -> web.Response:
        """Health of all replicas as one service: the sums of the numbers, and the weakest status."""
        answers = [await self._passed(request, address, request.rel_url, None) for address in await self._replicas()]
        healths = [Health.model_validate_json(_bytes(answer)) for answer in answers if answer.status == 200]
        if not healths:
            return answers[0] if answers else _unavailable("no replica of the sandbox can be found")
        weakest = max(healths, key=lambda health: ("ok", "degraded", "unsafe").index(health.status))
        numbers = {
            name: sum(getattr(health, name) for health in healths) for name in ("slots", "sessions", "running", "warm")
        }
        return web.json_response(body=weakest.model_copy(update=numbers).model_dump_json().encode())

    async def _replicas(self) -> Sequence[str]:
        with contextlib.suppress(OSError):
            return await self._resolve()
        return []

    async def _passed(
        self, request: web.Request, address: str, target: URL, body: bytes | aiohttp.StreamReader | None
    ) -> web.Response:
        """The replica's answer, or 503 if there is none."""
        host = f"[{address}]" if ":" in address else address
        url = URL(f"http://{host}:{self._port}{target.raw_path_qs}", encoded=True)
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        try:
            async with self._http.request(request.method, url, headers=headers, data=body) as response:
                kept = {
                    name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers
                }
                return web.Response(status=response.status, body=await response.read(), headers=kept)
        except (aiohttp.ClientError, OSError) as error:
            return _unavailable(f"a replica of the sandbox did not answer: {type(error).__name__}")


def _body(request: web.Request) -> aiohttp.StreamReader | None:
    return request.content if request.body_exists else None


def _unavailable(message: str) -> web.Response:
    return web.json_response({"error": "unavailable", "message": message}, status=503)


def _bytes(answer: web.Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


def _idempotency_key(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["idempotency_key"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # the service reports what is wrong with it


def _address(mark: str) -> str | None:
    try:
        return str(ipaddress.ip_address(bytes.fromhex(mark)))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolver(host: str, port: int) -> Resolve:
    """A function that asks the system's resolver each time, because replicas come and go."""

    async def resolve() -> Sequence[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return sorted({str(address[0]) for *_, address in found})

    return resolve


async def serve(gateway: Gateway, *, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    runner = web.AppRunner(gateway.app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 after SIGTERM or SIGINT, and 2 with one line for wrong arguments."""
    parser = argparse.ArgumentParser(prog="sandbox.gateway", description="One address for several sandbox services.")
    parser.add_argument("--to", required=True, metavar="NAME:PORT", help="name that resolves to every replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8321)
    options = parser.parse_args(argv)
    name, _, port = options.to.rpartition(":")
    if _is_loopback(name) and not _is_loopback(options.host):
        # a service that listens on another address demands tokens itself
        parser.error(f"--host {options.host} would let others at {options.to}, which may demand no token")
    asyncio.run(serve(Gateway(resolver(name, int(port)), int(port)), host=options.host, port=options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
