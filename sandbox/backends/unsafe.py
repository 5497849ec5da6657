"""The `unsafe` backend: resource limits only. For trusted code on machines where no other backend works.

A program can read this user's files, reach the network and signal this user's processes. Independent of executions.
"""

from __future__ import annotations

from sandbox.backends.base import BackendError, BackendSettings, Child
from sandbox.backends.forkserver import ForkServer


class UnsafeBackend:
    """See base.Backend."""

    name = "unsafe"

    def __init__(self, settings: BackendSettings, *, allow_unsafe: bool) -> None:
        self.isolation = "UNSAFE: resource limits only; programs reach this user's files, processes and network"
        self.degraded = ["UNSAFE: no isolation"]
        self._allow_unsafe = allow_unsafe
        self._server = ForkServer(settings, isolation="none")

    async def start(self) -> None:
        """See base.Backend."""
        if not self._allow_unsafe:
            raise BackendError("the unsafe backend isolates nothing: it starts only with --allow-unsafe")
        await self._server.start()

    async def spawn(self) -> Child:
        """See base.Backend."""
        return await self._server.spawn()

    async def stop(self) -> None:
        """See base.Backend."""
        await self._server.stop()
