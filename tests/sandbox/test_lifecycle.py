"""Starting, stopping and killing the service, as root and as a plain user; what it refuses to do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import httpx
import pytest

from sandbox.backends.base import BackendSettings
from sandbox.backends.namespaces import NamespacesBackend
from sandbox.client import SandboxClient, SandboxUnavailable, SessionLost
from sandbox.supervisor import Interpreter
from tests.sandbox.conftest import (
    TOKEN,
    Service,
    control_groups,
    descendants,
    is_running,
    own_tmp,
    start_service,
    stop_service,
    wait_until,
)
from tests.sandbox.tiers import TIERS, why_not

DAEMONS = """
import os, time
open('left', 'w').close()
if os.fork() == 0:
    os.setsid()
    os.fork()
time.sleep(100)
"""


async def test_embedded_leaves_nothing_behind() -> None:
    before = descendants(os.getpid())
    async with SandboxClient.embedded(slots=2) as client:
        async with client.session() as session:
            assert (await session.exec("6 * 7")).to_text() == "42"
        inside = descendants(os.getpid()) - before
        assert inside
    assert wait_until(lambda: not any(map(is_running, inside)))


@pytest.mark.parametrize(
    ("name", "signum"),
    [
        *product(["namespaces"], [signal.SIGKILL, signal.SIGTERM]),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in product(
                ["namespaces-plain", "landlock", "landlock-plain", "unsafe"], [signal.SIGKILL, signal.SIGTERM]
            )
        ),
        ("namespaces", signal.SIGINT),  # the service, not its tier, handles SIGINT like SIGTERM
    ],
)
async def test_no_orphan_survives_the_service(name: str, signum: int) -> None:
    if reason := why_not(TIERS[name]):
        pytest.skip(reason)
    with own_tmp() as tmp:
        service = TIERS[name].start(slots=2, env={"TMPDIR": str(tmp)})
        await killed_while_it_serves(service, signum)
        assert wait_until(lambda: not list(tmp.iterdir()))


async def killed_while_it_serves(service: Service, signum: int) -> None:
    async with SandboxClient(service.url, TOKEN) as client:
        session = await client.open_session()
        running = asyncio.create_task(session.exec(DAEMONS, timeout_s=100))
        assert await asyncio.to_thread(wait_until, lambda: len(descendants(service.process.pid)) >= 4)
        await asyncio.sleep(0.3)
        below = descendants(service.process.pid)
        await asyncio.to_thread(stop_service, service, signum)
        assert wait_until(lambda: not any(map(is_running, below)))
        assert wait_until(lambda: control_groups(service.process.pid) == [])
        running.cancel()


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


async def test_the_end_of_the_zygote_during_a_call_is_no_crash_of_the_program() -> None:
    before = descendants(os.getpid())
    backend = NamespacesBackend(BackendSettings(preload=()))
    await backend.start()
    try:
        interpreter = await Interpreter.start(backend)
        zygotes = [pid for pid in descendants(os.getpid()) - before if b"backends.zygote" in _command(pid)]
        order = interpreter.execute("while True: pass", timeout_s=60, max_output_bytes=1000, stdin=None, seed=None)
        call = asyncio.create_task(order)
        await asyncio.sleep(0)  # lets it begin
        os.kill(min(zygotes), signal.SIGKILL)
        result = await call
        assert (result.status, result.exit_code) == ("sandbox_error", None)
        assert "forked from" in result.stderr
        await interpreter.close()
    finally:
        await backend.stop()


async def test_a_plain_user_is_told_what_is_weaker() -> None:
    if reason := why_not(TIERS["namespaces-plain"]):
        pytest.skip(reason)
    service = TIERS["namespaces-plain"].start(slots=1)
    try:
        async with SandboxClient(service.url, TOKEN) as client:
            health = await client.health()
            assert "the service's own unprivileged uid" in health.isolation
            assert (health.status == "degraded") == any("watched by polling" in why for why in health.degraded)
    finally:
        stop_service(service)


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


@pytest.mark.parametrize("variable", ["AGENTRL_SANDBOX_TOKEN", "AGENTRL_SANDBOX_TOKEN_FILE"])
def test_the_token_of_the_environment_is_taken_without_a_flag(variable: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    value = "from-a-file" if variable == "AGENTRL_SANDBOX_TOKEN" else str(tmp_path / "token")
    service = start_service("--backend", "unsafe", "--allow-unsafe", "--preload", "", env={variable: value})
    try:
        opened = [
            httpx.post(f"{service.url}/v1/sessions", json={}, headers={"Authorization": f"Bearer {token}"}).status_code
            for token in ("x", "from-another", "from-a-file")
        ]
    finally:
        stop_service(service)
    assert opened == [401, 401, 200]


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        ({"AGENTRL_SANDBOX_TOKEN": ""}, [], "holds no token"),
        ({"AGENTRL_SANDBOX_TOKEN": " , "}, [], "holds no token"),
        ({"AGENTRL_SANDBOX_TOKEN_FILE": "/dev/null"}, [], "holds no token"),
        ({"AGENTRL_SANDBOX_TOKEN_FILE": "/no/such/file"}, [], "cannot read /no/such/file: No such file"),
        ({"AGENTRL_SANDBOX_TOKEN_FILE": "/"}, [], "cannot read /: Is a directory"),
        ({"AGENTRL_SANDBOX_TOKEN": "good"}, ["--token-env", "OTHER"], "OTHER holds no token"),
    ],
)
def test_a_service_that_was_meant_to_have_a_token_does_not_start_open(
    env: dict[str, str], flags: list[str], message: str
) -> None:
    command = [sys.executable, "-m", "sandbox", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env={**os.environ, **env})
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


_WITH_LIMIT = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
runpy.run_module("sandbox", run_name="__main__")
"""


def test_too_few_descriptors_are_refused_in_one_line() -> None:
    command = [sys.executable, "-c", _WITH_LIMIT.format(64), "--port", "0", "--backend", "unsafe", "--allow-unsafe"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "may open 64 files" in done.stderr and done.stderr.count("\n") == 1


async def test_few_descriptors_mean_few_sessions_and_each_of_them_works() -> None:
    flags = ("--backend", "unsafe", "--allow-unsafe", "--preload", "", "--slots", "2", "--token-env", "TEST_TOKENS")
    service = start_service(*flags, env={"TEST_TOKENS": TOKEN}, program=("-c", _WITH_LIMIT.format(256)))
    try:
        async with SandboxClient(service.url, TOKEN) as client:
            sessions = [await client.open_session() for _ in range(8)]
            assert [(await session.exec("6 * 7")).result for session in sessions] == ["42"] * 8
        refused = httpx.post(f"{service.url}/v1/sessions", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
        assert refused.status_code == 429 and "8 sessions are open" in refused.text
    finally:
        stop_service(service)
