"""Programs that fill memory or disk."""

from __future__ import annotations

import pytest

from sandbox.client import SandboxSession
from tests.sandbox.attacks.conftest import Healthy
from tests.sandbox.tiers import Tier

MEMORY = {
    "huge_list": "x = [0] * 10**10",
    "huge_bytes": "x = bytearray(10**12)",
    "huge_touched": "x = bytearray(10**9); x[::4096] = b'x' * len(x[::4096])",
    "growth": "x = []\nwhile True: x.append('x' * 10**6 + str(len(x)))",
    "numpy": "import numpy as np\nx = []\nwhile True: x.append(np.ones(10**6))",
    "processes": "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    x = bytearray(10**8)\n"
    "    x[::4096] = b'x' * len(x[::4096])\n    time.sleep(30)\ntime.sleep(30)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "c_recursion": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "string_growth": "x = 'x'\nwhile True: x += x",
    "shared": "import mmap\nm = []\nwhile True:\n  m.append(mmap.mmap(-1, 10**7)); m[-1][::4096] = b'x' * len(m[-1][::4096])",
    "children_in_turn": "import os\nwhile True:\n  if os.fork() == 0:\n    x = b'x' * 10**7\n    while True: pass",
    "dictionary": "x = {}\nwhile True: x[len(x)] = str(len(x)) * 100",
    "integer": "x = 3\nwhile True: x = x * x",
    "generator": "list(iter(int, 1))",
    "brackets": "eval('(' * 10**6 + ')' * 10**6)",
}


@pytest.mark.parametrize("name", MEMORY)
async def test_memory_is_bounded(session: SandboxSession, healthy: Healthy, name: str) -> None:
    result = await session.exec(MEMORY[name], timeout_s=3)
    assert result.status in {"oom", "error", "crashed", "timeout"}
    assert result.peak_rss_bytes < 600 * 1024**2
    after = await session.exec("6 * 7", timeout_s=5)
    if after.status == "crashed":  # what it kept in its variables left no room for another call
        after = await session.exec("6 * 7", timeout_s=5)
        assert after.state_lost
    assert after.result == "42"
    await healthy()


async def test_a_childs_end_for_memory_does_not_explain_a_later_end(isolated: Tier, session: SandboxSession) -> None:
    children = (
        "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    x = bytearray(15 * 10**7)\n"
        "    x[::4096] = b'x' * len(x[::4096])\n    time.sleep(30)\nos.wait()"
    )
    assert (await session.exec(children, timeout_s=5)).status in {"ok", "oom"}
    later = await session.exec("import os; os._exit(3)", timeout_s=5)
    assert (later.status, later.exit_code) == ("crashed", 3)


async def test_memory_of_a_process_without_its_main_thread_counts(isolated: Tier, session: SandboxSession) -> None:
    code = (
        "import ctypes, os, platform, threading, time\n"
        "def hold():\n  x = bytearray(10**8); x[::4096] = b'x' * len(x[::4096]); time.sleep(30)\n"
        "for _ in range(6):\n  if os.fork() == 0:\n    threading.Thread(target=hold, daemon=True).start()\n"
        "    ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"
        "  time.sleep(0.05)\n"
        "while os.waitpid(-1, os.WNOHANG)[0] == 0: time.sleep(0.01)\n'ended by the kernel'"
    )
    result = await session.exec(code, timeout_s=20)
    assert result.status == "oom" or result.result == "'ended by the kernel'"


FOLDERS = {"work": ".", "home": "~", "temporary": "TMPDIR", "tmp": "/tmp", "shared": "/dev/shm"}
OPEN = "import os, tempfile\nfolder = os.path.expanduser({folder!r}.replace('TMPDIR', tempfile.gettempdir()))\nn = 0\n"
FILL = {
    "large_files": "while True:\n  open(f'{folder}/f{n}', 'wb').write(b'x' * 10**6); n += 1",
    "one_file": "f = open(f'{folder}/f', 'wb')\nwhile True:\n  f.write(b'x' * 10**6); f.flush(); n += 1",
    "many_files": "while True:\n  open(f'{folder}/f{n}', 'wb').close(); n += 1",
    "deep": "while True:\n  folder += '/d'; os.mkdir(folder); n += 1",
    "deeper": "import itertools\nos.chdir(folder)\nfor n in itertools.count():\n  os.mkdir('d' * 200); os.chdir('d' * 200)\n"
    "  n > 30 and open('f', 'wb').write(b'x' * 10**5)",
    "sparse": "os.truncate(os.open(f'{folder}/f', os.O_CREAT | os.O_RDWR), 10**12)",
    "deleted_large": "fds = []\nwhile n < 40:\n  fds.append(os.open(f'{folder}/f', os.O_CREAT | os.O_RDWR)); "
    "os.unlink(f'{folder}/f')\n  os.write(fds[-1], b'x' * 8 * 10**6); n += 1\nimport time; time.sleep(0.5)",
    # through the C library, because Python's mmap keeps a copy of the descriptor
    "deleted_but_mapped": "import ctypes, mmap\nlibc = ctypes.CDLL(None)\nwhile n < 40:\n"
    "  fd = os.open(f'{folder}/f', os.O_CREAT | os.O_RDWR); os.unlink(f'{folder}/f'); os.write(fd, b'x' * 8 * 10**6)\n"
    "  libc.mmap(None, ctypes.c_size_t(8 * 10**6), 1, 1, fd, ctypes.c_long(0)); os.close(fd); n += 1\n"
    "import time; time.sleep(0.5)",
    "moved": "os.mkdir(f'{folder}/a'); os.mkdir(f'{folder}/b'); a, b = 'a', 'b'\nwhile True:\n"
    "  n < 40 and open(f'{folder}/{a}/f{n}', 'wb').write(b'x' * 4 * 10**6); n += 1\n"
    "  os.rename(f'{folder}/{a}', f'{folder}/{b}/c'); os.rename(f'{folder}/{b}', f'{folder}/{a}')\n"
    "  os.rename(f'{folder}/{a}/c', f'{folder}/{b}'); a, b = b, a",
    "exchanged": "os.mkdir(f'{folder}/d')\nwhile True:\n  os.rename(f'{folder}/d', f'{folder}/e'); os.symlink('/', f'{folder}/d')\n"
    "  open(f'{folder}/e/f{n}', 'wb').write(b'x' * 10**6); n += 1\n"
    "  os.unlink(f'{folder}/d'); os.rename(f'{folder}/e', f'{folder}/d')",
    "unreadable": "os.mkdir(f'{folder}/closed', 0o300)\nwhile n < 40:\n"
    "  open(f'{folder}/closed/f{n}', 'wb').write(b'x' * 8 * 10**6); n += 1\nimport time; time.sleep(0.5)",
    "deleted": "fds = []\nwhile True:\n  fds.append(os.open(f'{folder}/f{n}', os.O_CREAT | os.O_RDWR)); "
    "os.unlink(f'{folder}/f{n}'); os.write(fds[-1], b'x' * 10**6); n += 1",
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("name", FILL)
async def test_disks_are_small(session: SandboxSession, healthy: Healthy, tier: Tier, folder: str, name: str) -> None:
    if not tier.has_own_folders and folder in ("tmp", "shared"):
        if not tier.is_isolated:
            pytest.skip("unsafe writes where its user may: this would fill the host")
        assert (await session.exec(f"open('{FOLDERS[folder]}/f', 'w')")).status == "error"
        return
    # On a busy machine ten thousand small files take seconds: the disk should end it, not the clock.
    result = await session.exec(OPEN.format(folder=FOLDERS[folder]) + FILL[name], timeout_s=15)
    # a file system of its own is full; elsewhere the watchdog ends it. Deleted files are in no folder: the limit on
    # open files ends those
    assert result.status == "error" if tier.has_own_folders else result.status in {"error", "oom"}
    after = await session.exec("n", timeout_s=5)
    assert after.state_lost or int(after.result or 0) <= 10_000
    await healthy()
