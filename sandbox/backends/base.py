"""What a backend promises, and the records it deals in. Knows nothing of any one backend."""

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
    """What every backend is told."""

    limits: Limits = field(default_factory=Limits)
    disk_bytes: int = 64 * 1024**2
    """Of a session's work folder, and of each of its other writable folders."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    """Modules to import once for all sessions."""
    image: str = "agentrl-sandbox"
    """Of the docker backend's containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an interpreter ended, as the kernel told it."""

    exit_code: int | None  # negative: by that signal; None: unknown, its parent died too
    cpu_s: float
    peak_rss_bytes: int
    is_oom: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an interpreter has used since its start."""

    cpu_s: float
    peak_rss_bytes: int


class Listener(Protocol):
    """Whoever reads what a child says. All of it is untrusted."""

    def on_control(self, data: bytes) -> None:
        """Some bytes of the worker's frames; empty when no more will come."""

    def on_output(self, stream: Stream, data: bytes) -> None:
        """Some bytes the program printed."""


class Child(Protocol):
    """One walled-in interpreter, held from outside."""

    exited: asyncio.Future[Exit]
    is_watched: bool  # no kernel limit bounds its processes' sum, so somebody has to ask `is_over_limit` during calls

    def listen(self, listener: Listener) -> None:
        """From now on tell `listener` what the child says."""

    async def send(self, data: bytes) -> None:
        """Frames for the worker. Raises ConnectionError when it has ended."""

    def signal(self, signum: int) -> None:
        """Send a signal to the interpreter; nothing happens when it has ended."""

    def usage(self) -> Usage:
        """CPU time and peak memory so far."""

    async def settle(self) -> bool:
        """Stop the interpreter, kill every other process of the session and hand over what they had printed.

        False when some process could not be killed.
        """

    def is_over_limit(self) -> bool:
        """Whether the session uses more memory or disk than it may. Slow: for a thread."""

    async def restrict(self, limits: Limits) -> None:
        """Lower the limits it was started with. Raises OSError."""

    async def close(self) -> None:
        """Kill all of it, wait until it is gone, and give back what it held on the host."""


class Backend(Protocol):
    """A way to make children."""

    name: str
    isolation: str  # the walls that are up, in words
    degraded: list[str]  # what is weaker than it should be, and why

    async def start(self) -> None:
        """Get ready to spawn. Raises BackendError."""

    async def spawn(self) -> Child:
        """A fresh interpreter that has said it is ready. Raises BackendError."""

    async def stop(self) -> None:
        """End every child and the backend's own processes."""
