"""Command line of the service: `python -m sandbox`. Independent of how sessions work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandbox import open_files
from sandbox.backends.base import BackendError, BackendSettings
from sandbox.backends.probe import start_backend
from sandbox.pool import Pool, PoolSettings
from sandbox.protocol import BACKENDS, Limits

EXIT_USAGE = 2
TOKEN_VARIABLE = "AGENTRL_SANDBOX_TOKEN"
SHUTDOWN_DEADLINE_S = 3

log = logging.getLogger("sandbox")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 2, with one line, when the settings cannot be served."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    variable = options.token_env or TOKEN_VARIABLE
    try:
        tokens = _tokens(variable)
    except (OSError, UnicodeDecodeError) as error:
        return _refuse(f"{variable}_FILE: cannot read {os.environ[f'{variable}_FILE']}: {_reason(error)}")
    if not tokens and (options.token_env or variable in os.environ or f"{variable}_FILE" in os.environ):
        return _refuse(
            f"the environment variable {variable} holds no token, nor does {variable}_FILE: set one of them"
            + ("" if options.token_env else ", or unset both to serve this machine without a token")
        )
    if not tokens and not _is_loopback(options.host):
        return _refuse(
            f"{options.host} can be reached by others: give a token with {variable}, or with --token-env NAME"
        )
    warm = options.slots if options.warm is None else options.warm
    limit = open_files.raise_limit()
    try:
        capacity = open_files.capacity(limit, slots=options.slots, warm=warm, max_sessions=options.max_sessions)
    except ValueError as error:
        return _refuse(str(error))
    if capacity.sessions < options.max_sessions:
        log.warning("%d sessions at most: this process may open %d files (ulimit -n)", capacity.sessions, limit)
    settings = PoolSettings(
        slots=options.slots,
        warm=warm,
        max_sessions=capacity.sessions,
        num_tenants=max(len(tokens), 1),
        limits=Limits(memory_bytes=options.memory_bytes, num_processes=options.num_processes),
    )
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        return _refuse(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}. Choose "
            "another --port, or 0 for any free one"
        )
    with listener:
        try:
            asyncio.run(_serve(options, listener, tokens, settings, capacity.connections))
        except BackendError as error:
            return _refuse(f"no sandbox can run here: {error}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox",
        description="Run untrusted Python in isolated sessions, over HTTP.",
        epilog="backends:\n" + "\n".join(f"  {name:<12}{line}" for name, line in BACKENDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8321, help="0 takes a free port")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="what isolates sessions (see below)")
    parser.add_argument("--slots", type=int, default=8, help="executions at the same time")
    parser.add_argument("--warm", type=int, default=None, help="interpreters kept ready (default: as many as slots)")
    parser.add_argument("--max-sessions", type=int, default=1024)
    parser.add_argument("--memory-bytes", type=int, default=512 * 1024**2, help="of one session")
    parser.add_argument("--num-processes", type=int, default=64, help="processes and threads of one session")
    parser.add_argument("--disk-bytes", type=int, default=64 * 1024**2, help="of a session's work folder, and of /tmp")
    parser.add_argument(
        "--preload",
        default="numpy,sympy",
        metavar="MODULES",
        help="modules to import once for all sessions (default: numpy,sympy)",
    )
    parser.add_argument("--image", default="agentrl-sandbox", help="of the docker backend's containers")
    parser.add_argument("--strict", action="store_true", help="do not start when anything is weaker than it should be")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="variable with the bearer tokens, comma-separated, one per tenant; NAME_FILE: a file with them "
        f"(default: {TOKEN_VARIABLE}, where it or {TOKEN_VARIABLE}_FILE is set)",
    )
    parser.add_argument("--allow-unsafe", action="store_true", help="permit the backend that isolates nothing")
    parser.add_argument("--ready-fd", type=int, help="write {port, backend} as a JSON line here when serving")
    parser.add_argument("--alive-fd", type=int, help="stop when this descriptor is closed at its other end")
    return parser


def _tokens(name: str) -> list[str]:
    """The tokens in the variable `name`, else in the file of `name`_FILE. Raises OSError, UnicodeDecodeError."""
    text = os.environ.get(name, "")
    if not text and (path := os.environ.get(f"{name}_FILE")):
        text = Path(path).read_text()
    return [token.strip() for token in text.split(",") if token.strip()]


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "no reason given" if isinstance(error, OSError) else "it is not text"


def _refuse(message: str) -> int:
    sys.stderr.write(f"sandbox: {message}\n")
    return EXIT_USAGE


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named, because asyncio turns Nagle off only for a known TCP socket; this saves 40 ms per call
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


async def _serve(
    options: argparse.Namespace,
    listener: socket.socket,
    tokens: Sequence[str],
    settings: PoolSettings,
    max_connections: int,
) -> None:
    import uvicorn  # here, so that --help and the refusals above stay fast

    from sandbox.connections import ConnectionLimits, bounded
    from sandbox.server import create_app

    class Server(uvicorn.Server):
        """A server without signal handlers: uvicorn's would end the process before the sandboxes are gone."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if options.alive_fd is not None:
        loop.add_reader(options.alive_fd, stop.set)
    backend_settings = BackendSettings(
        limits=settings.limits,
        disk_bytes=options.disk_bytes,
        preload=tuple(filter(None, options.preload.split(","))),
        image=options.image,
    )
    backend = await start_backend(
        options.backend, backend_settings, allow_unsafe=options.allow_unsafe, strict=options.strict
    )
    try:
        async with Pool(backend, settings) as pool:
            config = uvicorn.Config(
                create_app(pool, tokens=tokens),
                http=bounded(ConnectionLimits(max_connections=max_connections)),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=SHUTDOWN_DEADLINE_S,
            )
            server = Server(config)
            async with asyncio.TaskGroup() as group:
                group.create_task(server.serve(sockets=[listener]), name="http")
                if not tokens:
                    log.warning(
                        "no token is set: every program on this machine can use the service (%s)", TOKEN_VARIABLE
                    )
                _announce(options.ready_fd, listener.getsockname()[1], backend.name)
                await stop.wait()
                server.should_exit = True
    finally:
        await backend.stop()


def _announce(ready_fd: int | None, port: int, name: str) -> None:
    """Report the port. The socket listens already; clients that connect now are answered as soon as the loop runs."""
    log.info("serving on port %d with the %s backend", port, name)
    if ready_fd is not None:
        os.write(ready_fd, json.dumps({"port": port, "backend": name}).encode() + b"\n")
        os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
