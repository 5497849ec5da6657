"""Where in the user's code something is: the line that defines a method, raised an error, or is executed.

Code of agentrl, of the sandbox and of libraries is not the user's. Independent of environments.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl.supervision.stacks import callers

_ROOT = Path(__file__).resolve().parents[2]
_NOT_THE_USERS = (f"{_ROOT}/agentrl/", f"{_ROOT}/sandbox/", "/site-packages/", f"{sys.base_prefix}/lib/")


def defined_at(function: Callable[..., Any] | type | None) -> str:
    """`file:line` of a function's or class's `def`; empty where it is not the user's.

    Example: `defined_at(Shop.score)` is `shop.py:31`.
    """
    found: Any = inspect.unwrap(function) if callable(function) else function
    found = getattr(found, "__func__", found)
    try:
        path, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):
        return ""
    return "" if path is None or not _is_users(path) else _place(path, line)


def raised_at(error: BaseException) -> str:
    """`file:line` of the innermost line of the user's that an exception passed; empty where it passed none.

    For the TimeoutError of a deadline: the line that was waiting.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _place(error.filename, error.lineno)
    found = ""
    trace = error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            found = _place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    cause = error.__cause__ or error.__context__
    return raised_at(cause) if not found and isinstance(cause, asyncio.CancelledError) else found


def threads_run_at() -> str:
    """`file:line` of the user's code that a thread other than the main one executes, such as a tool's; else empty."""
    others = [ident for ident in sys._current_frames() if ident != threading.main_thread().ident]
    return next(filter(None, map(runs_at, others)), "")


def runs_at(ident: int | None) -> str:
    """`file:line` of the user's code that a thread executes now; empty where it executes none."""
    frame = None if ident is None else sys._current_frames().get(ident)
    return _innermost(callers(frame))


def runs_in(frame: FrameType) -> str:
    """`file:line` that a frame is at; empty where it is not the user's."""
    return _innermost([frame])


def in_brackets(place: str) -> str:
    """` (file:line)` for the end of a message; empty for no place."""
    return f" ({place})" if place else ""


def _innermost(frames: Iterable[FrameType]) -> str:
    users = [frame for frame in frames if _is_users(frame.f_code.co_filename)]
    return _place(users[-1].f_code.co_filename, users[-1].f_lineno) if users else ""


def _is_users(path: str) -> bool:
    return not path.startswith("<") and not any(part in str(Path(path).absolute()) for part in _NOT_THE_USERS)


def _place(path: str, line: int) -> str:
    """Relative to the working folder where the file is inside it."""
    absolute = os.path.abspath(path)
    inside = os.path.relpath(absolute)
    return f"{absolute if inside.startswith('..') else inside}:{line}"
