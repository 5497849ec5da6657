"""Runs blocking work in a thread of its own, which can delay neither a cancellation nor the exit of the process.

`asyncio.to_thread` is not used: all episodes share its few workers, and a worker that is stuck keeps the process from
ending. Independent of what the work is.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
GRACE_S = 1.0


class StopSignal(threading.Event):
    """Set when the result is no longer needed. A blocking tool that takes one as an argument can end early.

    Example:
        stop = StopSignal()
        answer = await in_thread(lambda: search(query, stop), name="search", stop=stop)
    """


async def in_thread(work: Callable[[], T], *, name: str, stop: StopSignal | None = None) -> T:
    """The result of `work`, which sees the caller's context variables; its exceptions are raised here.

    A cancellation sets `stop` and gives the thread GRACE_S seconds to end. A thread that still runs then is abandoned,
    and a warning says so.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    ended = asyncio.Event()

    def settle(result: T | None, error: BaseException | None) -> None:
        ended.set()
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result where there is no error

    def target() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(work)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future refuses the first; the others would end this process instead of the work.
            failure = RuntimeError(f"{type(error).__name__}({error})")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has closed: the result is no longer needed
            loop.call_soon_threadsafe(settle, result, failure)

    context = contextvars.copy_context()
    threading.Thread(target=target, name=name, daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await ended.wait()
        if not ended.is_set():
            log.warning("%s continues after its cancellation; its thread is abandoned", name)
        raise
