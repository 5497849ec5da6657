"""Starting, stopping and killing the service, as root and as a plain user; what it refuses to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.client import SandboxClient, SandboxUnavailable, SessionLost
from tests.sandbox.conftest import TOKEN, control_groups, descendants, start_service, stop_service, wait_until

PLAIN_UID = 65_534

AS_PLAIN_USER = """
import os, pathlib, sys
from sandbox.backends import linux
uid = int(sys.argv[1])
linux.unshare(linux.CLONE_NEWNS)
linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
kept = {path: os.open(path, os.O_PATH) for path in (sys.base_prefix, sys.prefix, os.environ["PYTHONPATH"])}
for path in kept:  # Python may live in a home that is closed to others: show it below an open folder of that name
    closed = [p for p in reversed(pathlib.Path(path).parents) if not p.stat().st_mode & 1]
    if closed:
        linux.mount("open", str(closed[0]), "tmpfs", 0, "mode=755")
for path, fd in kept.items():
    if not os.path.isdir(path):
        os.makedirs(path)
        linux.mount(f"/proc/self/fd/{fd}", path, None, linux.MS_BIND | linux.MS_REC)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
os.chdir("/")
os.execv(sys.executable, [sys.executable, "-m", "sandbox", *sys.argv[2:]])
"""


async def test_embedded_leaves_nothing_behind() -> None:
    before = descendants(os.getpid())
    async with SandboxClient.embedded(slots=2) as client:
        async with client.session() as session:
            assert (await session.exec("6 * 7")).to_text() == "42"
        inside = descendants(os.getpid()) - before
        assert inside
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_no_orphan_survives_the_service(signum: int) -> None:
    service = start_service("--backend", "namespaces", "--slots", "2", "--token-env", "TEST_TOKENS")
    async with SandboxClient(service.url, TOKEN) as client:
        session = await client.open_session()
        await session.exec("import os, time\nif os.fork() == 0: time.sleep(100)", timeout_s=1)
        running = descendants(service.process.pid)
        assert len(running) >= 3
        stop_service(service, signum)
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))
        assert wait_until(lambda: control_groups(service.process.pid) == [])


async def test_a_session_of_an_earlier_service_is_lost() -> None:
    flags = ("--backend", "namespaces", "--slots", "1", "--token-env", "TEST_TOKENS")
    first = start_service(*flags)
    port = first.url.rsplit(":", 1)[1]
    async with SandboxClient(first.url, TOKEN) as client:
        session = await client.open_session()
        await session.exec("x = 1")
        stop_service(first, signal.SIGKILL)
        second = start_service(*flags, "--port", port)
        try:
            with pytest.raises(SessionLost):
                await session.exec("x")
            async with client.session() as fresh:
                assert (await fresh.exec("6 * 7")).result == "42"
        finally:
            stop_service(second)


async def test_a_killed_zygote_is_replaced() -> None:
    before = descendants(os.getpid())
    async with SandboxClient.embedded(slots=1) as client:
        session = await client.open_session()
        await session.exec("x = 1")
        zygotes = [pid for pid in descendants(os.getpid()) - before if b"backends.zygote" in _command(pid)]
        os.kill(min(zygotes), signal.SIGKILL)
        assert wait_until(lambda: not any(_command(pid) for pid in zygotes))
        after = await session.exec("6 * 7")
        assert (after.status, after.result, after.state_lost) == ("ok", "42", True)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.getuid() != 0, reason="dropping to a plain user needs root")
async def test_a_plain_user_gets_the_same_walls() -> None:
    flags = ("--backend", "namespaces", "--slots", "2", "--token-env", "TEST_TOKENS", "--memory-bytes", str(2**28))
    service = start_service(*flags, program=["-c", AS_PLAIN_USER, str(PLAIN_UID)])
    try:
        async with SandboxClient(service.url, TOKEN) as client, client.session() as session:
            health = await client.health()
            assert health.backend == "namespaces"
            assert (health.status == "degraded") == any("watched by polling" in why for why in health.degraded)
            assert (await session.exec("import numpy; int(numpy.arange(4).sum())")).result == "6"
            assert (await session.exec("while True: pass", timeout_s=0.3)).status == "timeout"
            code = (
                "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n    x = b'x' * 10**8\n    time.sleep(9)\n"
            )
            assert (await session.exec(code + "time.sleep(9)", timeout_s=8)).status == "oom"
            fork_bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
            assert (await session.exec(fork_bomb, timeout_s=0.5)).status in {"timeout", "oom"}
            assert (await session.exec("import os; os.listdir('/proc').count('1')")).result == "1"
            assert (await session.exec("open('/proc/sys/kernel/core_pattern', 'r+')")).status == "error"
            assert (await session.exec("import socket; socket.create_connection(('127.0.0.1', 1))")).status == "error"
    finally:
        running = descendants(service.process.pid)
        assert stop_service(service) == 0
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))


async def test_unsafe_needs_a_flag() -> None:
    with pytest.raises(SandboxUnavailable, match="allow-unsafe"):
        async with SandboxClient.embedded(backend="unsafe"):
            pass


async def test_unsafe_says_so_and_keeps_its_limits() -> None:
    async with SandboxClient.embedded(backend="unsafe", slots=1, allow_unsafe=True) as client:
        health = await client.health()
        assert health.status == "unsafe" and "UNSAFE" in health.isolation
        async with client.session() as session:
            assert (await session.exec("x = 1\nwhile True: pass", timeout_s=0.3)).status == "timeout"
            assert (await session.exec("x")).result == "1"
            assert (await session.exec("y = bytearray(10**12)")).status == "error"
            folder = (await session.exec("import os; os.getcwd()")).result or ""
        assert wait_until(lambda: not Path(folder.strip("'")).exists())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "{used}"], "cannot listen on 127.0.0.1"),
        (["--host", "0.0.0.0"], "give a token"),
        (["--token-env", "NO_SUCH_VARIABLE"], "holds no token"),
        (["--backend", "unsafe", "--port", "0"], "allow-unsafe"),
        (["--preload", "numpy,no_such_module", "--port", "0"], "not installed here: no_such_module"),
        (["--backend", "unsafe", "--allow-unsafe", "--strict", "--port", "0"], "UNSAFE"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(flags: list[str], message: str) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        command = [flag.format(used=used.getsockname()[1]) for flag in flags]
        done = subprocess.run(
            [sys.executable, "-m", "sandbox", *command], capture_output=True, text=True, check=False, timeout=30
        )
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


async def test_more_modules_can_be_preloaded() -> None:
    code = "import sys; 'colorsys' in sys.modules, 'numpy' in sys.modules"
    async with SandboxClient.embedded(slots=1, preload="colorsys") as client, client.session() as session:
        assert (await session.exec(code)).result == "(True, False)"
