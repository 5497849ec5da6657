"""Programs that never end are stopped, and the processor is free again."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.attacks.conftest import Healthy

TIERS_TO_TRY = ("namespaces", "docker", "landlock", "unsafe")

T = 0.6

TIME = {
    "loop": "while True: pass",
    "swallow": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "ignore_signals": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n"
    "  except Exception: pass\nwhile True: pass",
    "block_signals": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "one_c_call": "10**10**10",
    "regex": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "sleep": "import time; time.sleep(10**6)",
    "hostile_repr": "class A:\n  def __repr__(self):\n    while True: pass\nA()",
    "hostile_exception": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E()",
    "finally": "try:\n  while True: pass\nfinally:\n  while True: pass",
    "threads_and_loop": "import threading\ndef f():\n  while True: pass\n"
    "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nf()",
    "join_thread": "import threading\ndef f():\n  while True: pass\nt = threading.Thread(target=f)\nt.start(); t.join()",
    "nested_swallow": "def f():\n  while True:\n    try:\n      while True: pass\n    except BaseException: f()\nf()",
    "del": "class A:\n  def __del__(self):\n    while True: pass\nA()\nwhile True: pass",
    "trace": "import sys\ndef t(*a):\n  while True: pass\nsys.settrace(t)\n(lambda: 1)()",
    "deadlock": "import threading\na = threading.Lock(); a.acquire(); a.acquire()",
    "pipe": "import os\nr, w = os.pipe(); os.read(r, 1)",
    "wait_child": "import os\nif os.fork() == 0:\n  while True: pass\nos.wait()",
    "sum": "sum(range(10**12))",
    "sort": "x = list(range(10**6))\nwhile True: x.sort(key=lambda v: -v); x.reverse()",
    "sympy": "import sympy; sympy.factorint(2**521 - 1 + 2**600)",
    "numpy_threads": "import numpy as np, threading\na = np.random.rand(500, 500)\ndef f():\n  while True: a @ a\n"
    "for _ in range(3): threading.Thread(target=f, daemon=True).start()\nf()",
    "alarm_swallowed": "import signal\nsignal.signal(signal.SIGINT, lambda *a: None)\nwhile True: signal.pause()",
    "numpy": "import numpy as np\na = np.random.rand(2000, 2000)\nwhile True: a = a @ a / 1e3",
}


@pytest.mark.parametrize("name", TIME)
async def test_time_is_taken_back(session: SandboxSession, healthy: Healthy, name: str) -> None:
    ready = await session.exec("1", timeout_s=5)  # the first session of a tier may wait for its container
    assert ready.status == "ok"
    began = time.monotonic()
    result = await session.exec(TIME[name], timeout_s=T)
    assert result.status == "timeout"
    assert time.monotonic() - began < T + 10
    after = await session.exec("6 * 7", timeout_s=5)
    assert (after.status, after.result) == ("ok", "42")
    await healthy()


LEFT_RUNNING = {
    "thread": "import threading\ndef f():\n  while True: print('x')\nthreading.Thread(target=f, daemon=True).start()",
    "timer": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)",
    "virtual_timer": "import signal\nsignal.signal(signal.SIGVTALRM, lambda *a: None)\n"
    "signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)",
    "atexit": "import atexit\ndef f():\n  while True: pass\natexit.register(f)",
    "threading_timer": "import threading, os\nthreading.Timer(0.1, lambda: os.write(1, b'late')).start()",
    "gc_callback": "import gc\ngc.callbacks.append(lambda *a: None)",
    "profile": "import sys\nsys.setprofile(lambda *a: None)",
}


@pytest.mark.parametrize("name", LEFT_RUNNING)
async def test_what_is_left_running_harms_only_its_own_session(
    session: SandboxSession, healthy: Healthy, name: str
) -> None:
    assert (await session.exec(LEFT_RUNNING[name], timeout_s=T)).status in {"ok", "error"}
    await asyncio.sleep(0.2)
    await healthy()
    for _ in range(2):
        result = await session.exec("6 * 7", timeout_s=2)
        assert result.result == "42" or result.status == "error"
    assert (await session.exec("1 + 1", timeout_s=5)).status in {"ok", "error"}
