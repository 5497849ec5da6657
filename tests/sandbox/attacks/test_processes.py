"""Programs that fork, kill other processes, crash, or start other programs."""

from __future__ import annotations

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.attacks.conftest import Healthy
from tests.sandbox.conftest import Service, descendants, wait_until
from tests.sandbox.tiers import Tier

T = 0.6
MAX_IDLE_PROCESSES = 16  # four warm interpreters, some sessions, the backend's own

PROCESSES = {
    "fork_bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "thread_bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(1000)\n"
    "  os._exit(0)\nos.wait()",
    "kill_all": "import os\nos.kill(-1, 9)",
    "kill_parent": "import os\nos.kill(os.getppid(), 9)",
    "kill_self": "import os\nos.kill(1, 9)",
    "kill_others": "import os\nfor p in range(2, 40000):\n  try: os.kill(p, 9)\n  except OSError: pass",
    "child_answers": "import os\nif os.fork() == 0:\n  print('child')",
    "child_returns": "import os\npid = os.fork()\npid and os.wait() and None",
    "kill_group": "import os\nos.killpg(0, 9)",
    "daemon_holds_stdout": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  while True: os.write(1, b'x' * 1000)",
    "orphans": "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    if os.fork() == 0: time.sleep(100)\n    os._exit(0)\n"
    "os._exit(0)",
    "zombies": "import os\nfor _ in range(20):\n  if os.fork() == 0: os._exit(0)",
    "stopped_child": "import os, signal\nif os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)",
    "deaf_child": "import os, signal\nif os.fork() == 0:\n  signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    "  while True: pass",
    "multiprocessing": "import multiprocessing as m\nm.get_context('fork').Pool(4).map(abs, range(10))",
    "nice": "import os\nos.nice(19)",
    "stop_self": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "close_all": "import os\nos.closerange(0, 1000)",
    "exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "segfault": "import ctypes\nctypes.string_at(0)",
}


KILLERS = ("kill_all", "kill_parent", "kill_self", "kill_others", "kill_group")  # without walls these reach the host
COUNT = "import os; len([p for p in os.listdir('/proc') if p.isdigit()])"


@pytest.mark.parametrize("name", PROCESSES)
async def test_processes_do_not_outlive_their_call(
    session: SandboxSession, healthy: Healthy, tier: Tier, service: Service, name: str
) -> None:
    if name in KILLERS and not tier.is_isolated:
        pytest.skip("unsafe isolates nothing")
    result = await session.exec(PROCESSES[name], timeout_s=T)
    assert result.status in {"ok", "error", "timeout", "crashed", "oom"}
    if tier.num_visible_pids is not None:
        assert (await session.exec(COUNT, timeout_s=5)).result == str(tier.num_visible_pids)
    assert (await session.exec("6 * 7", timeout_s=5)).result == "42"
    if tier.processes_are_ours:
        assert wait_until(lambda: len(descendants(service.process.pid)) < MAX_IDLE_PROCESSES)
    await healthy()


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("import os; os._exit(0)", 0), ("import os; os._exit(7)", 7), ("import ctypes; ctypes.string_at(0)", -11)],
)
async def test_a_crash_is_told_by_the_kernel(session: SandboxSession, code: str, exit_code: int) -> None:
    assert (await session.exec("x = 1")).status == "ok"
    result = await session.exec(code)
    assert (result.status, result.exit_code) == ("crashed", exit_code)
    after = await session.exec("x")
    assert after.state_lost and "NameError" in (after.traceback or "")
    assert not (await session.exec("1")).state_lost


@pytest.mark.parametrize(
    "command", ["/bin/ls", "/bin/su", "/usr/bin/python3", "/usr/bin/passwd", "/proc/self/exe", "./own"]
)
async def test_other_programs_do_not_run(isolated: Tier, session: SandboxSession, command: str) -> None:
    await session.exec("open('own', 'w').write('#!/bin/sh')")
    result = await session.exec(f"import os; os.execv('{command}', ['x'])")
    assert result.status == "error" and ("Permission" in result.to_text() or "No such file" in result.to_text())
    run = await session.exec(f"import subprocess; subprocess.run(['{command}'])")
    assert run.status == "error"
