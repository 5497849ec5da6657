"""Event loops and threads: one on a thread of its own, and whether one makes progress, seen from another thread.

A pass of an event loop may be long without any code that blocks: thousands of tasks compute a little each. Calls whose
deadlines must hold meanwhile need another loop. Independent of what runs in the loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """One thread with one event loop. What still runs in it when the block ends is cancelled.

    Example:
        async with LoopThread("orchestrator") as thread:
            answer = await thread.run(call())
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._loop = await asyncio.wrap_future(self._started)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the thread. Raises what it raises; cancelling this cancels it."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _turn(self) -> None:
        asyncio.run(self._until_over())

    async def _until_over(self) -> None:
        self._over = asyncio.Event()
        self._started.set_result(asyncio.get_running_loop())
        await self._over.wait()


class LoopPulse:
    """Whether an event loop goes from task to task. Ask from one other thread.

    Example:
        pulse = LoopPulse(asyncio.get_running_loop())
        threading.Thread(target=lambda: print(pulse.moved())).start()
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[object] | None = None

    def moved(self) -> bool:
        """Whether another task runs than at the last call. Also false where the loop is idle."""
        before, self._task = self._task, asyncio.current_task(self._loop)
        return self._task is not before and self._task is not None
