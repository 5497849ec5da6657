"""Hostile programs through the HTTP API; after each one the service answers at once and the next session is healthy."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from sandbox.client import SandboxClient, SandboxSession
from tests.sandbox.conftest import SECRET

T = 0.8

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
    "join_thread": "import threading\nt = threading.Thread(target=lambda: [None for _ in iter(int, 1)])\n"
    "t.start(); t.join()",
    "numpy": "import numpy as np\na = np.random.rand(3000, 3000)\nwhile True: a = a @ a / 1e3",
}


async def _healthy(client: SandboxClient) -> None:
    began = time.monotonic()
    health = await client.health()
    assert health.backend == "namespaces"
    assert time.monotonic() - began < 1.0
    async with client.session() as fresh:
        assert (await fresh.exec("6 * 7", timeout_s=5)).result == "42"


@pytest.mark.parametrize("name", TIME)
async def test_time_is_taken_back(client: SandboxClient, session: SandboxSession, name: str) -> None:
    began = time.monotonic()
    result = await session.exec(TIME[name], timeout_s=T)
    assert result.status == "timeout"
    assert time.monotonic() - began < T + 2.5
    after = await session.exec("6 * 7", timeout_s=5)
    assert (after.status, after.result) == ("ok", "42")
    await _healthy(client)


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
    "brackets": "eval('(' * 10**6 + ')' * 10**6)",
}


@pytest.mark.parametrize("name", MEMORY)
async def test_memory_is_bounded(client: SandboxClient, session: SandboxSession, name: str) -> None:
    result = await session.exec(MEMORY[name], timeout_s=3)
    assert result.status in {"oom", "error", "crashed", "timeout"}
    assert result.peak_rss_bytes < 600 * 1024**2
    assert (await session.exec("6 * 7", timeout_s=5)).result == "42"
    await _healthy(client)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/home/sandbox", "."])
async def test_disks_are_small(client: SandboxClient, session: SandboxSession, folder: str) -> None:
    code = f"n = 0\nwhile True:\n  open('{folder}/f%d' % n, 'wb').write(b'x' * 10**6); n += 1"
    result = await session.exec(code, timeout_s=3)
    assert result.status == "error" and "No space left" in (result.traceback or "")
    assert int((await session.exec("n")).result or 0) < 40
    await _healthy(client)


@pytest.mark.parametrize("folder", ["/", "/usr", "/etc", "/dev", "/home", "/proc/1/root/usr"])
async def test_everything_else_is_read_only(session: SandboxSession, folder: str) -> None:
    result = await session.exec(f"open('{folder}/x', 'w')")
    assert result.status == "error"


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
    "stop_self": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "close_all": "import os\nos.closerange(0, 1000)",
    "exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "segfault": "import ctypes\nctypes.string_at(0)",
}


@pytest.mark.parametrize("name", PROCESSES)
async def test_processes_do_not_outlive_their_call(client: SandboxClient, session: SandboxSession, name: str) -> None:
    result = await session.exec(PROCESSES[name], timeout_s=T)
    assert result.status in {"ok", "error", "timeout", "crashed", "oom"}
    after = await session.exec("import os; [p for p in os.listdir('/proc') if p.isdigit()]", timeout_s=5)
    assert after.result == "['1']"
    await _healthy(client)


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


@pytest.mark.parametrize("command", ["/bin/ls", "/bin/su", "/usr/bin/python3", "/usr/bin/passwd"])
async def test_other_programs_do_not_run(session: SandboxSession, command: str) -> None:
    result = await session.exec(f"import subprocess; subprocess.run(['{command}'])")
    assert result.status == "error" and ("Permission" in result.to_text() or "No such file" in result.to_text())


OUTPUT = {
    "endless": ("while True: print('x' * 1000)", {"output_limit", "timeout"}),
    "endless_stderr": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output_limit", "timeout"}),
    "endless_raw": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"output_limit", "timeout"}),
    "long_line": ("print('x' * 200_000)", {"ok"}),
    "long_result": ("'x' * 10_000_000", {"ok"}),
    "long_traceback": ("raise ValueError('x' * 10_000_000)", {"error"}),
    "deep_traceback": ("def f(n): return f(n + 1)\nf(0)", {"error"}),
}


@pytest.mark.parametrize("name", OUTPUT)
async def test_output_is_capped(client: SandboxClient, session: SandboxSession, name: str) -> None:
    code, statuses = OUTPUT[name]
    result = await session.exec(code, timeout_s=3, max_output_bytes=10_000)
    assert result.status in statuses
    for text in (result.stdout, result.stderr, result.result or "", result.traceback or ""):
        assert len(text.encode()) <= 10_100
    assert result.truncated or name == "deep_traceback"
    await _healthy(client)


async def test_odd_bytes_come_out_as_text(session: SandboxSession) -> None:
    result = await session.exec("import os; _ = os.write(1, b'\\xff\\x00\\x1b[31m ok'); print('\\ud800 <|im_end|>')")
    assert result.status == "ok"
    assert "ok" in result.stdout and "\\ud800 <|im_end|>" in result.stdout


FORGERIES = {
    "blind": 'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'\\n{"ok": true, "result": "forged"}\\n\')\n'
    "  except OSError: pass",
    "garbage": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'{' * 200_000)\n  except OSError: pass",
    "wrong_token": 'import os\nos.write(3, b\'\\n{"token": "00", "ok": true, "result": "forged"}\\n\')\nNone',
    "nested": "import os\nos.write(3, b'\\n' + b'[' * 60_000 + b'\\n')\nNone",
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_forged_frames_change_nothing(session: SandboxSession, name: str) -> None:
    result = await session.exec(FORGERIES[name] + "\n6 * 7", timeout_s=3)
    assert (result.status, result.result) == ("ok", "42")
    crash = await session.exec(FORGERIES[name] + "\nos._exit(3)", timeout_s=3)
    assert (crash.status, crash.exit_code) == ("crashed", 3)


async def test_an_early_frame_with_the_true_token_buys_no_time(client: SandboxClient, session: SandboxSession) -> None:
    code = (
        "import sys, os, json\nf = sys._getframe()\n"
        "while 'request' not in f.f_locals or 'token' not in f.f_locals['request']: f = f.f_back\n"
        "token = f.f_locals['request']['token']\n"
        "os.write(3, b'\\n' + json.dumps({'token': token, 'ok': True, 'result': 'early'}).encode() + b'\\n')\n"
        "import time\nn = 0\nwhile True: n += 1"
    )
    early = await session.exec(code, timeout_s=2)
    assert early.status in {"ok", "timeout"}
    after = await session.exec("1", timeout_s=T)
    assert after.status == "timeout"  # the old cell still holds the interpreter, and pays for it
    again = await session.exec("6 * 7")
    assert again.result == "42"
    await _healthy(client)


INPUTS = {
    "empty": ("", "ok"),
    "blank": (" \n\n", "ok"),
    "comment": ("# nothing", "ok"),
    "nul": ("1\0", "error"),
    "bom": ("\ufeff1 + 1", "ok"),
    "surrogate": ("'\ud800'", "error"),
    "syntax": ("def f(:", "error"),
    "input": ("input()", "error"),
    "exit": ("exit()", "ok"),
    "exit_code": ("import sys; sys.exit(3)", "error"),
    "quit_text": ("raise SystemExit('bye')", "error"),
    "big": ("x = '" + "x" * 10_000_000 + "'", "ok"),
    "broken_stdout": ("import sys; sys.stdout.close(); sys.stdout = None", "ok"),
    "broken_builtins": ("import builtins; del builtins.print, builtins.repr, builtins.len, builtins.str", "crashed"),
}


@pytest.mark.parametrize("name", INPUTS)
async def test_any_input_is_answered(client: SandboxClient, session: SandboxSession, name: str) -> None:
    code, status = INPUTS[name]
    result = await session.exec(code, timeout_s=5)
    assert result.status == status
    await _healthy(client)


async def test_stdin_is_given(session: SandboxSession) -> None:
    assert (await session.exec("input() + input()", stdin="a\nb\n")).result == "'ab'"


SECRETS = {
    "environ": "import os; str(dict(os.environ))",
    "proc_environ": "open('/proc/1/environ').read()",
    "all_environs": "import glob; ''.join(open(p, errors='replace').read() for p in glob.glob('/proc/*/environ'))",
    "parents": "open('/proc/1/root/proc/1/environ').read()",
}


@pytest.mark.parametrize("name", SECRETS)
async def test_the_hosts_environment_is_not_there(session: SandboxSession, name: str) -> None:
    result = await session.exec(SECRETS[name])
    assert SECRET not in result.model_dump_json()
    assert "TEST_TOKENS" not in result.model_dump_json()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/hostname",
        "/root/.bashrc",
        "/proc/kcore",
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/var/run/docker.sock",
        "/dev/mem",
        "/dev/kvm",
        str(Path(__file__)),
    ],
)
async def test_host_files_are_not_there(session: SandboxSession, path: str) -> None:
    for mode in ("rb", "r+b"):
        result = await session.exec(f"open({path!r}, {mode!r})")
        assert result.status == "error"


async def test_the_next_session_finds_nothing(client: SandboxClient) -> None:
    async with client.session() as first:
        await first.exec("for d in ('/tmp', '/dev/shm', '.'): open(d + '/left', 'w').write('x')\nx = 1")
    async with client.session() as second:
        result = await second.exec("import os; [os.listdir(d) for d in ('/tmp', '/dev/shm', '.')], 'x' in globals()")
    # A Python that is installed below /tmp is linked there, for everybody alike.
    python = [Path(sys.prefix).parts[2]] if sys.prefix.startswith("/tmp/") else []
    assert result.result == str(([python, [], []], False))


CONNECT = "import socket; s = socket.socket({family}, {kind}); s.settimeout(3); s.connect({address})"
NETWORK = {
    "tcp": CONNECT.format(family="2", kind="1", address="('1.1.1.1', 80)"),
    "udp": CONNECT.format(family="2", kind="2", address="('1.1.1.1', 53)"),
    "ipv6": CONNECT.format(family="10", kind="1", address="('::1', 80)"),
    "metadata": CONNECT.format(family="2", kind="1", address="('169.254.169.254', 80)"),
    "local": CONNECT.format(family="2", kind="1", address="('127.0.0.1', {port})"),
    "dns": "import socket; socket.getaddrinfo('example.com', 80)",
    "raw": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet": "import socket; socket.socket(17, 3)",
    "netlink": "import socket; socket.socket(16, 3, 0)",
    "vsock": "import socket; socket.socket(40, 1).connect((2, 1))",
    "alg": "import socket; socket.socket(38, 5, 0)",
    "docker": CONNECT.format(family="1", kind="1", address="'/var/run/docker.sock'"),
    "abstract": CONNECT.format(family="1", kind="1", address="b'\\0sandbox-test'"),
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/healthz')",
}


@pytest.mark.parametrize("name", NETWORK)
async def test_there_is_no_network(client: SandboxClient, session: SandboxSession, name: str) -> None:
    code = NETWORK[name].replace("{port}", client.url.rsplit(":", 1)[1])
    result = await session.exec(code, timeout_s=3)
    assert result.status == "error"
    assert result.wall_s < 1.0


SYSCALLS = {  # x86_64 number, arguments
    "mount": (165, "b'none', b'/tmp', b'tmpfs', 0, 0"),
    "umount": (166, "b'/proc', 2"),
    "unshare_user": (272, "0x10000000"),
    "unshare_mount": (272, "0x20000"),
    "clone_user": (56, "0x10000000 | 17, 0, 0, 0, 0"),
    "clone3": (435, "0, 0"),
    "setns": (308, "3, 0"),
    "pivot_root": (155, "b'.', b'.'"),
    "chroot": (161, "b'/tmp'"),
    "ptrace": (101, "16, 1, 0, 0"),
    "process_vm_readv": (310, "1, 0, 0, 0, 0, 0"),
    "bpf": (321, "0, 0, 0"),
    "io_uring": (425, "8, 0"),
    "keyctl": (250, "0, -3"),
    "add_key": (248, "b'user', b'a', b'b', 1, -3"),
    "perf": (298, "0, 0, -1, -1, 0"),
    "userfaultfd": (323, "0"),
    "memfd": (319, "b'x', 0"),
    "init_module": (175, "0, 0, b''"),
    "kexec": (246, "0, 0, 0, 0"),
    "reboot": (169, "0xfee1dead, 672274793, 0, 0"),
    "setuid": (105, "0"),
    "settime": (227, "0, 0"),
    "personality": (135, "0x40000"),
    "open_by_handle": (304, "-1, 0, 0"),
    "execve": (59, "b'/bin/true', 0, 0"),
    "shmget": (29, "0, 10**9, 0o1600"),
    "x32": (0x40000000 + 39, ""),
    "unknown": (5000, ""),
    "tiocsti": (16, "0, 0x5412, b'x'"),
}


@pytest.mark.parametrize("name", SYSCALLS)
async def test_the_kernels_doors_are_shut(session: SandboxSession, name: str) -> None:
    number, arguments = SYSCALLS[name]
    code = (
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = libc.syscall({number}, {arguments})\nresult, ctypes.get_errno()"
    )
    if (await session.exec("import platform; platform.machine()")).result != "'x86_64'":
        pytest.skip("the numbers above are those of x86_64")
    result = await session.exec(code)
    assert result.result in {"(-1, 1)", "(-1, 38)"}  # EPERM, ENOSYS


async def test_no_capability_and_an_unprivileged_uid(session: SandboxSession) -> None:
    result = await session.exec("print(open('/proc/self/status').read())")
    status = dict(line.split(":\t", 1) for line in result.stdout.splitlines() if ":\t" in line)
    assert {status[key].strip() for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    assert status["Uid"].split() == ["1000"] * 4
