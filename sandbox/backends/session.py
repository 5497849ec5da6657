"""How a process becomes a session's interpreter: preloaded libraries, its descriptors, then the worker.

Independent of how it is isolated.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from sandbox import worker
from sandbox.backends import isolate, seccomp

_STANDARD_MODULES = ("collections", "decimal", "fractions", "functools", "itertools", "math", "re", "statistics")
_REHEARSAL = ("x = 6\nprint(x)", "x * 7", "1 / 0")
_CONTROL_FD = 3
_SETUP_FAILED = 70  # EX_SOFTWARE


def preload(modules: Sequence[str]) -> None:
    """Import what sessions use, run what each session does first, then exclude all of it from garbage collection."""
    for name in (*_STANDARD_MODULES, *modules):
        importlib.import_module(name)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # imports a further module on first use
    if "sympy" in sys.modules:
        sympy = sys.modules["sympy"]
        sympy.solve(sympy.sympify("x**2 - 2"))  # loads what sympy imports on first use
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {', '.join(modules)} starts threads when it is imported, and cannot be preloaded")
    _rehearse()
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would copy every page


def _rehearse() -> None:
    """Do what every session does first, so that forks inherit its imports, caches and specialised bytecode."""
    for shares_host, is_charged in ((False, True), (False, False), (True, False)):
        seccomp.program(os.uname().machine, shares_host=shares_host, is_charged=is_charged)
    isolate.library_folders()
    isolate.address_space_bytes()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for code in _REHEARSAL * 10:
            request = {"op": "exec", "token": "", "code": code, "stdin": None, "seed": None, "max_output_bytes": 10_000}
            ours.sendall(json.dumps(request).encode() + b"\n")
        ours.shutdown(socket.SHUT_WR)
        worker.Worker(theirs.fileno(), theirs.fileno()).serve()


def become_worker(fds: list[int], confine: Callable[[], None], *, groups: Sequence[int] = ()) -> NoReturn:
    """In a fresh fork: take `fds` (control, stdout, stderr), `confine()`, and serve. Reports failures on control.

    `groups`: the cgroup.procs files, open for writing, of the control groups to join first.
    """
    try:
        not_joined = _join(groups)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _arrange_descriptors(fds)
        if not_joined is not None:
            raise not_joined
        os.setsid()
        confine()
        # otherwise every session without a seed would draw the same numbers
        worker.seed_generators(int.from_bytes(os.urandom(4)))
        worker.Worker(_CONTROL_FD, _CONTROL_FD).serve()
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(_CONTROL_FD, b"\n" + json.dumps({"failed": traceback.format_exc()[-4000:]}).encode() + b"\n")
        os._exit(_SETUP_FAILED)
    os._exit(0)


def _join(groups: Sequence[int]) -> OSError | None:
    """Join control groups. Returns the error, which can be reported only once the descriptors are arranged."""
    try:
        for fd in groups:
            os.write(fd, b"0")  # the writer itself
    except OSError as error:
        return error
    return None


def _arrange_descriptors(fds: list[int]) -> None:
    """Set 0: /dev/null, 1: stdout, 2: stderr, 3: control, and close everything else that was inherited."""
    null = os.open("/dev/null", os.O_RDONLY)
    control, stdout, stderr = fds
    high = [os.dup(fd) for fd in (null, stdout, stderr, control)]
    floor = max(high) + 1
    moved: list[int] = []
    for fd in high:  # numbers above every target, so that no dup2 below overwrites a source
        os.dup2(fd, floor + 8 + len(moved))
        moved.append(floor + 8 + len(moved))
    for target, fd in enumerate(moved):
        os.dup2(fd, target, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
