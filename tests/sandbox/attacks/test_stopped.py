"""A session is stopped between two calls: none of its processes or threads runs."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.tiers import Tier

COUNT = (
    "import ctypes, fcntl, os, signal, threading, time\nlibc = ctypes.CDLL(None)\nn = 0\n"
    "def count():\n  global n\n  while True:\n    n += 1; time.sleep(0.001)\n"
    "threading.Thread(target=count, daemon=True).start()\n"
)
ARRANGEMENTS = {
    "nothing": "",
    "alarm": "signal.signal(signal.SIGALRM, lambda *a: os.kill(os.getpid(), signal.SIGCONT))\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)",
    "posix_timer": "event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)\ntimer = ctypes.c_void_p()\n"
    "libc.timer_create(1, event, ctypes.byref(timer)) == 0 and "
    "libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000), None)",
    "exit_signal": "import platform\n"
    "pid = libc.syscall({'x86_64': 56, 'aarch64': 220}[platform.machine()], int(signal.SIGCONT), 0, 0, 0, 0)\n"
    "while pid == 0: time.sleep(1)",
    "process_group": "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ngroup, (r, w) = os.getpgrp(), os.pipe()\n"
    "if os.fork() == 0:\n  try:\n    os.setpgid(0, 0)\n    if os.fork() == 0: os.setpgid(0, group)\n  except OSError: pass\n"
    "  os.write(w, b'x')\n  time.sleep(100)\nos.read(r, 1)",
    "descriptor_signal": "try:\n  fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(1, 10, int(signal.SIGCONT))\n"
    "  fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_ASYNC)\nexcept OSError: pass\n"
    "def write():\n  while True: os.write(1, b'x' * 1000)\n"
    "threading.Thread(target=write, daemon=True).start()\ntime.sleep(0.05)",
    "stray": "me = os.getpid()\nif os.fork() == 0:\n  os.setsid()\n  while True: os.kill(me, signal.SIGCONT)",
    "strays": "me = os.getpid()\nfor _ in range(5):\n  if os.fork() == 0:\n    while True: os.kill(me, signal.SIGCONT)",
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
async def test_a_session_does_not_run_between_calls(isolated: Tier, session: SandboxSession, name: str) -> None:
    first = await session.exec(COUNT + ARRANGEMENTS[name] + "\nNone", timeout_s=2)
    assert first.status in {"ok", "error", "output_limit"}
    began = int((await session.exec("n")).result or -1)
    await asyncio.sleep(1.0)
    after = await session.exec("n")
    assert after.state_lost or int(after.result or -1) - began < 200  # a second of freedom is about 900


LEADERLESS = (
    "import ctypes, os, platform, threading, time\n"
    "EXIT = {'x86_64': 60, 'aarch64': 93}[platform.machine()]\n"
    "def beat():\n  while True:\n    with open('beats', 'a') as file: file.write('x')\n    time.sleep(0.005)\n"
    "def leave():\n  threading.Thread(target=beat, daemon=True).start()\n"
    "  ctypes.CDLL(None).syscall(EXIT, 0)\n"
)
LEAVERS = {
    "child": "if os.fork() == 0: leave()",
    "grandchild": "if os.fork() == 0:\n  if os.fork() == 0: leave()\n  os._exit(0)",
    "daemon": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: leave()\n  os._exit(0)",
    "child_of_a_thread": "threading.Thread(target=lambda: os.fork() or leave()).start()",
    "parent_of_another": "if os.fork() == 0:\n  if os.fork() == 0: leave()\n  leave()",
}


@pytest.mark.parametrize("name", LEAVERS)
async def test_a_process_without_its_main_thread_ends_with_the_call(
    isolated: Tier, session: SandboxSession, name: str
) -> None:
    wait = "\nwhile not os.path.exists('beats'): time.sleep(0.001)"
    assert (await session.exec(LEADERLESS + LEAVERS[name] + wait, timeout_s=5)).status == "ok"
    sizes = "before = os.path.getsize('beats'); time.sleep(0.3); os.path.getsize('beats') - before"
    assert (await session.exec(sizes)).result == "0"
