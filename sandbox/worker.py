"""The program inside every sandbox: a persistent interpreter that is driven by frames on a descriptor.

It runs in one process with hostile code, so its output is not trusted: the supervisor checks frames by a token that is
new for each call, and takes the status from the kernel and its own clock. Does not depend on how it is isolated.
Frames are JSON lines. Each also starts with a newline, so that garbage written between two frames spoils neither.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import io
import json
import linecache
import os
import random
import signal
import stat
import sys
import traceback
import types
from typing import Any, cast

OUTPUT_HARD_CAP_BYTES = 16 * 1024**2
"""More output than this on one stream ends the call: the supervisor interrupts, and the worker stops forwarding it."""


class _Stream(io.RawIOBase):
    """The raw stream of sys.stdout or sys.stderr: written line by line at first, in blocks once past the cap."""

    def __init__(self, fd: int, line_bytes: int) -> None:
        self._fd, self._line_bytes, self._num_bytes, self._block = fd, line_bytes, 0, bytearray()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = bytes(data)
        self._num_bytes += len(view)
        if self._num_bytes - len(view) <= OUTPUT_HARD_CAP_BYTES:
            self._block += view
            if self._num_bytes <= self._line_bytes or len(self._block) >= 65_536:
                self.drain()
        return len(view)

    def drain(self) -> None:
        """Write out the buffered rest."""
        block, self._block = self._block, bytearray()
        view = memoryview(block)
        while view:
            view = view[os.write(self._fd, view) :]


class Worker:
    """One interpreter. `serve` answers frames until the descriptor closes."""

    def __init__(self, control_in: int, control_out: int) -> None:
        self._in = os.fdopen(control_in, "rb", buffering=65_536, closefd=False)
        self._out_fd = control_out
        self._pid = os.getpid()
        self._saved = {fd: os.dup(fd) for fd in (0, 1, 2)}
        self._folder = os.getcwd()
        self._num_cells = 0
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def serve(self) -> None:
        """Read and answer requests, one after the other. Returns when the supervisor closes the descriptor."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._send({"ready": True})
        while line := self._in.readline():
            request = json.loads(line)
            self._end_leftovers()  # reaps those that the supervisor killed after the last reply
            reply = self._exec(request) if request["op"] == "exec" else self._file(request)
            if os.getpid() != self._pid:  # a child that the cell forked returned up the stack
                os._exit(0)
            self._end_leftovers()
            self._send({**reply, "token": request["token"]})

    def _send(self, frame: dict[str, Any]) -> None:
        texts = {key: _printable(value) if isinstance(value, str) else value for key, value in frame.items()}
        view = memoryview(b"\n" + json.dumps(texts).encode() + b"\n")
        while view:
            view = view[os.write(self._out_fd, view) :]

    def _end_leftovers(self) -> None:
        """End processes that the call left. Kills only if this is pid 1, which proves a pid namespace of its own."""
        with contextlib.suppress(OSError):
            if self._pid == 1:
                os.kill(-1, signal.SIGKILL)
            while os.waitpid(-1, 0 if self._pid == 1 else os.WNOHANG)[0]:
                pass

    # -- code ---------------------------------------------------------------------------------------------------

    def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        cap = int(request["max_output_bytes"])
        if (seed := request.get("seed")) is not None:
            seed_generators(seed)
        streams = self._open_streams(request.get("stdin") or "", cap)
        reply: dict[str, Any] = {"ok": False, "result": None, "traceback": None, "exit_code": None}
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                reply.update(self._run_cell(request["code"], cap))
            except KeyboardInterrupt:
                reply["traceback"] = "KeyboardInterrupt"
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:  # between the two lines above
            reply["traceback"] = "KeyboardInterrupt"
        if os.getpid() == self._pid:
            _flush(streams)
        return reply

    def _open_streams(self, stdin: str, cap: int) -> list[_Stream]:
        """Open descriptors 0-2 and sys.stdout afresh, whatever the last cell did to them."""
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        raws = [_Stream(1, cap), _Stream(2, cap)]
        sys.stdin = io.StringIO(stdin)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True) for raw in raws
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        return raws

    def _run_cell(self, code: str, cap: int) -> dict[str, Any]:
        self._num_cells += 1
        name = f"<cell {self._num_cells}>"
        code = code.removeprefix("\ufeff")
        space = self._module.__dict__
        try:
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            tree = cast(ast.Module, compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True))
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec", dont_inherit=True), space)
            value = None
            if isinstance(last, ast.Expr):
                expression = ast.Expression(last.value)
                value = eval(compile(expression, name, "eval", dont_inherit=True), space)
            return {"ok": True, "result": None if value is None else _cut(str(repr(value)), cap)}
        except SystemExit as stop:
            exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            text = None if exit_code == 0 else f"SystemExit: {_cut(str(stop.code), cap)}"
            return {"ok": exit_code == 0, "exit_code": exit_code, "traceback": text}
        except BaseException as error:
            return {"ok": False, "traceback": _format(error, cap)}

    # -- files --------------------------------------------------------------------------------------------------

    def _file(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "put":
                data = base64.b64decode(request["data"])
                fd = _open_beneath(
                    self._folder, request["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, make_parents=True
                )
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                return {"ok": True}
            with os.fdopen(_open_beneath(self._folder, request["path"], os.O_RDONLY), "rb") as file:
                data = file.read(request["max_bytes"] + 1)
            if len(data) > request["max_bytes"]:
                return {"ok": False, "traceback": "the file is too large"}
            return {"ok": True, "result": base64.b64encode(data).decode()}
        except (OSError, ValueError) as error:
            return {"ok": False, "traceback": f"{type(error).__name__}: {error}"}


def _open_beneath(root: str, path: str, flags: int, *, make_parents: bool = False) -> int:
    """Open a regular file below `root` without following symlinks in any part. Raises OSError, ValueError."""
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in path:
        raise ValueError("the path must be relative, without empty parts, '.' and '..'")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            if make_parents:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        # O_NONBLOCK: opening a named pipe must not wait for its other end
        fd = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("not a regular file")
    return fd


def seed_generators(seed: int) -> None:
    """Seed the global generators of `random`, and of numpy and sympy where they are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "sympy.core.random" in sys.modules:
        sys.modules["sympy.core.random"].seed(seed)


def _flush(raws: list[_Stream]) -> None:
    """Flush what the cell printed. The cell may have closed or replaced any of these streams."""
    for stream, raw in zip((sys.stdout, sys.stderr), raws, strict=True):
        with contextlib.suppress(Exception):
            stream.flush()
        with contextlib.suppress(OSError):
            raw.drain()


def _printable(text: str) -> str:
    """`text` with lone surrogates escaped, because not every reader of JSON accepts them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str, cap: int) -> str:
    """The head and the tail of `text`, at most `cap` characters."""
    if len(text) <= cap:
        return text
    return text[: cap // 2] + f"... [{len(text) - cap} characters cut] ..." + text[len(text) - cap // 2 :]


def _format(error: BaseException, cap: int) -> str:
    """The traceback without the worker's own frames. The exception may be hostile, for example in its __str__."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        report = traceback.TracebackException(type(error), error, trace, limit=-50, compact=True)
        return _cut("".join(report.format()), cap)
    except BaseException as second:
        return f"{type(error).__name__} (its traceback could not be formatted: {type(second).__name__})"
