"""Every stack of a process as text: asyncio tasks down to the line where they wait, and threads."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

MAX_TASKS = 2000


def task_stacks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """One text per task, name first, the outermost coroutine on top. May be called from another thread."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    yield f"{len(tasks)} asyncio tasks" + (f", the first {MAX_TASKS} of them" if len(tasks) > MAX_TASKS else "")
    for task in tasks[:MAX_TASKS]:
        state = "being cancelled" if task.cancelling() else "waiting"
        yield f"task {task.get_name()!r} ({state})\n{_text(list(_awaited(task.get_coro())))}"


def thread_stacks() -> Iterator[str]:
    """One text per thread, name first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, 'not made by Python')!r} ({ident})\n{_text(list(callers(frame)))}"


def innermost_of_thread(ident: int) -> str:
    """`innermost` of the frame that the thread executes now."""
    frame = sys._current_frames().get(ident)
    return "a thread that has ended" if frame is None else innermost(frame)


def innermost(frame: FrameType) -> str:
    """`file:line in function` of the frame, or of its nearest caller outside of libraries."""
    frames = list(callers(frame))
    own = [frame for frame in frames if not _is_library(frame)]
    chosen = (own or frames)[-1]
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"


def _awaited(waiting: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of those it awaits. asyncio's own `get_stack` shows only the outermost one."""
    while waiting is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(waiting, f"{kind}_frame", None)) is not None:
                yield frame
                waiting = getattr(waiting, f"{kind}_await", None) or getattr(waiting, f"{kind}_yieldfrom", None)
                break
        else:
            return


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, outermost first; none for None."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    yield from reversed(frames)


def _text(frames: list[FrameType]) -> str:
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(lines.format()) or "  (it has no Python frame)\n"


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<") or any(part in path for part in ("/site-packages/", f"{sys.base_prefix}/lib/"))
