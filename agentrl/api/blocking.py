"""Runs asynchronous work to its end for a caller that is not: a script, a notebook, a command.

Interrupted, it lets the work clean up before it raises KeyboardInterrupt. Independent of what the work is.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, whose exceptions are raised here.

    Where the calling thread runs an event loop already (a notebook, an `async` function), the work runs in a thread
    with a loop of its own; the caller's loop stands still meanwhile. In the main thread, Ctrl-C, SIGTERM (a container
    stops) and SIGHUP (a terminal closes) cancel the work. Once it has cleaned up, KeyboardInterrupt is raised. A signal
    that the process ignores, and a SIGTERM or SIGHUP with a handler, are left as they are.

    Example:
        groups = blocking(play(request))
    """
    cancelling = _Cancelling()
    runner = _in_thread if _is_loop_running() else asyncio.run
    try:
        with _taking_signals(cancelling.ask):
            result: T = runner(cancelling.run(work))
    except _Interrupted:
        raise KeyboardInterrupt from None
    if cancelling.is_asked:  # too late to cancel anything: the caller still has to stop
        raise KeyboardInterrupt
    return result


class _Interrupted(Exception):
    """A signal to stop arrived, and the work has cleaned up."""


class _Cancelling:
    """Cancels the work when asked to by a signal."""

    def __init__(self) -> None:
        self.is_asked = False
        self._cancel: Callable[[], object] = lambda: None

    def ask(self) -> None:
        """Cancel the work, or cancel it as soon as it runs. A second time: cancel what its clean-up waits for."""
        self.is_asked = True
        self._cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. Raises _Interrupted where it was cancelled because that was asked."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop has closed: the work is over
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        if self.is_asked:
            cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_asked:
                raise _Interrupted from None
            raise


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, done by a thread with an event loop of its own, while this thread waits."""
    outcome: Future[T] = Future()

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:
            outcome.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=lambda: context.run(target), name="agentrl", daemon=True).start()
    return outcome.result()  # signal handlers run meanwhile


@contextmanager
def _taking_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` for the signals that would stop this process, while the block runs. Only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        ask()

    taken = {number: handler for number in _STOPPING if _may_be_taken(number, handler := signal.getsignal(number))}
    for number in taken:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _may_be_taken(number: signal.Signals, handler: Any) -> bool:
    """Ctrl-C unless it is ignored: asyncio and notebooks have handlers that would only end the wait for the work."""
    if number is signal.SIGINT:
        return handler not in (signal.SIG_IGN, None)
    return handler is signal.SIG_DFL
