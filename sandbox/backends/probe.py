"""Picks the strongest backend that works here, by running a program in it. Independent of backends' internals."""

from __future__ import annotations

import logging

from sandbox.backends.base import Backend, BackendError, BackendSettings
from sandbox.backends.docker import DockerBackend
from sandbox.backends.landlock import LandlockBackend
from sandbox.backends.namespaces import NamespacesBackend
from sandbox.backends.unsafe import UnsafeBackend
from sandbox.protocol import BACKENDS
from sandbox.supervisor import Interpreter

log = logging.getLogger(__name__)

STRONGEST_FIRST = tuple(name for name in BACKENDS if name != "auto")


async def start_backend(
    name: str, settings: BackendSettings, *, allow_unsafe: bool = False, strict: bool = False
) -> Backend:
    """Start a backend and run a program in it. Never weaker than requested: raises BackendError with every reason.

    `strict`: refuse a degraded backend.
    """
    candidates = STRONGEST_FIRST if name == "auto" else (name,)
    reasons = []
    for candidate in candidates:
        backend = _make(candidate, settings, allow_unsafe=allow_unsafe)
        try:
            await backend.start()
            await _try_out(backend)
            if strict and backend.degraded:
                raise BackendError(f"degraded, which --strict refuses: {'; '.join(backend.degraded)}")
        except BackendError as error:
            await backend.stop()
            reasons.append(f"{candidate}: {error}")
            continue
        except BaseException:
            await backend.stop()
            raise
        log.info("backend %s: %s", backend.name, backend.isolation)
        return backend
    raise BackendError("; ".join(reasons))


def _make(name: str, settings: BackendSettings, *, allow_unsafe: bool) -> Backend:
    match name:
        case "namespaces":
            return NamespacesBackend(settings)
        case "docker":
            return DockerBackend(settings)
        case "landlock":
            return LandlockBackend(settings)
        case "unsafe":
            return UnsafeBackend(settings, allow_unsafe=allow_unsafe)
    raise BackendError(f"unknown backend {name!r}: one of {', '.join(BACKENDS)}")


async def _try_out(backend: Backend) -> None:
    interpreter = await Interpreter.start(backend)
    try:
        result = await interpreter.execute("6 * 7", timeout_s=10.0, max_output_bytes=1000, stdin=None, seed=None)
        if result.result != "42":
            raise BackendError(f"a test program failed: {result.status} {result.stderr} {result.traceback}")
    finally:
        await interpreter.close()
