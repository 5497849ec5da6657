"""The interface of a backend, and its records. Independent of any one backend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sandbox.protocol import Limits

Stream = Literal["stdout", "stderr"]


class BackendError(Exception):
    """The backend cannot run here, or failed to start a session; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The settings of every backend.

    >>> BackendSettings(preload=("numpy",)).disk_bytes // 1024**2
    64
    """

    limits: Limits = field(default_factory=Limits)
    disk_bytes: int = 64 * 1024**2
    """Size of a session's work folder, and of each of its other writable folders."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    """Modules to import once for all sessions."""
    image: str = "agentrl-sandbox"
    """Image of the docker backend's containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an interpreter ended, as the kernel reported it.

    Example: `Exit(exit_code=-9, cpu_s=1.5, peak_rss_bytes=2**29, is_oom=True)`.
    """

    exit_code: int | None  # negative: killed by that signal; None: unknown, because its parent died too
    cpu_s: float
    peak_rss_bytes: int
    is_oom: bool
    is_failure: bool = False  # the backend failed; the program did not end it


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an interpreter has used since its start.

    Example: `child.usage().cpu_s`.
    """

    cpu_s: float
    peak_rss_bytes: int


class Listener(Protocol):
    """Receives a child's output. All of it is untrusted.

    Example: `child.listen(listener)` passes output to `listener.on_output("stdout", b"42\\n")`.
    """

    def on_control(self, data: bytes) -> None:
        """Receive some bytes of the worker's frames; empty at the end."""

    def on_output(self, stream: Stream, data: bytes) -> None:
        """Receive some bytes that the program printed."""


class Child(Protocol):
    """One isolated interpreter, controlled from outside.

    Example: `child = await backend.spawn()`, then `await child.send(frame)`, and `await child.close()` at the end.
    """

    exited: asyncio.Future[Exit]
    is_watched: bool  # the kernel does not bound everything, so `is_over_limit` must be polled during calls

    def listen(self, listener: Listener) -> None:
        """From now on pass the child's output to `listener`."""

    async def send(self, data: bytes) -> None:
        """Send frames to the worker. Raises ConnectionError when it has ended."""

    def signal(self, signum: int) -> None:
        """Send a signal to the interpreter. No-op when it has ended."""

    def usage(self) -> Usage:
        """CPU time and peak memory so far."""

    async def settle(self) -> bool:
        """Stop the interpreter, kill every other process of the session, and pass on what they had printed.

        False when some process could not be killed.
        """

    def is_over_limit(self) -> bool:
        """Whether the session uses more than allowed of what the kernel does not bound. Slow: call it in a thread."""

    async def restrict(self, limits: Limits) -> None:
        """Lower the limits it was started with. Raises OSError."""

    async def close(self) -> None:
        """Kill all its processes, wait until they are gone, and free what they held on the host."""


class Backend(Protocol):
    """A way to make isolated children.

    Example:
        await backend.start()
        child = await backend.spawn()
        await child.close()
        await backend.stop()
    """

    name: str
    isolation: str  # the active isolation, in words
    degraded: list[str]  # what is weaker than it should be, and why

    async def start(self) -> None:
        """Get ready to spawn. Raises BackendError."""

    async def spawn(self) -> Child:
        """Start an interpreter. Returns when it is ready. Raises BackendError."""

    async def stop(self) -> None:
        """End every child and the backend's own processes."""
