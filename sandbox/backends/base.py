"""What a backend promises, and the records it deals in. Knows nothing of any one backend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from sandbox.protocol import Limits


class BackendError(Exception):
    """The backend cannot run here, or failed to start a session; the message says why."""


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


class Child(Protocol):
    """One walled-in interpreter, held from outside. The three descriptors are non-blocking and owned by this object."""

    control_fd: int  # a stream socket; frames of worker.py
    stdout_fd: int
    stderr_fd: int
    exited: asyncio.Future[Exit]
    has_memory_cgroup: bool  # without one the supervisor has to look at `memory_bytes` itself

    def signal(self, signum: int) -> None:
        """Send a signal to the interpreter; nothing happens when it has ended."""

    def usage(self) -> Usage:
        """CPU time and peak memory so far."""

    def memory_bytes(self) -> int:
        """Proportional share of memory of all its processes."""

    def end_strays(self) -> bool:
        """Kill every other process of the session; False when some are left."""

    def restrict(self, limits: Limits) -> None:
        """Lower the limits it was started with."""

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
