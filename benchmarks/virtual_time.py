"""An event loop whose clock jumps to the next timer: asyncio code runs unchanged through hours in seconds.

Nothing in it may wait for a socket or a thread, since the clock would not wait for them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout == 0:
            return []  # some task can run; sockets are polled only when none can
        if events := super().select(0):
            return events
        if timeout is None:
            raise Deadlock("all tasks wait for one another")
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` is simulated seconds since the start."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Simulated seconds."""
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in simulated time. Raises Deadlock instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
