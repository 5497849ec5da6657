"""The docker backend beyond the attacks: its message when it cannot start, and its leftovers after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from sandbox.backends import docker as docker_backend
from sandbox.backends import isolate, uids
from sandbox.backends.base import BackendSettings
from sandbox.client import SandboxClient, SandboxUnavailable
from tests.docker_engine import IMAGE
from tests.sandbox.conftest import TOKEN, stop_service, wait_until
from tests.sandbox.tiers import TIERS

pytestmark = [pytest.mark.slow, pytest.mark.docker]


def docker(environment: Mapping[str, str], *arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], env=dict(environment), capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def containers(environment: Mapping[str, str]) -> list[str]:
    return docker(environment, "ps", "--all", "--quiet", "--filter", "label=agentrl.sandbox").split()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_no_container_outlives_the_service(docker_environment: dict[str, str], signum: int) -> None:
    before = set(containers(docker_environment))
    service = TIERS["docker"].start(slots=2, env=docker_environment)
    async with SandboxClient(service.url, TOKEN) as client:
        session = await client.open_session()
        assert (await session.exec("6 * 7")).result == "42"
        assert set(containers(docker_environment)) - before
        stop_service(service, signum)
        assert wait_until(lambda: set(containers(docker_environment)) <= before, 20)


async def test_a_container_killed_from_outside_is_replaced(docker_environment: dict[str, str]) -> None:
    service = TIERS["docker"].start(slots=1, env=docker_environment)
    try:
        async with SandboxClient(service.url, TOKEN) as client, client.session() as session:
            await session.exec("x = 1")
            for container in containers(docker_environment):
                docker(docker_environment, "kill", container)
            after = await session.exec("6 * 7", timeout_s=10)
            assert (after.status, after.result, after.state_lost) == ("ok", "42", True)
    finally:
        stop_service(service)


async def test_a_container_is_as_hard_as_it_says(docker_environment: dict[str, str]) -> None:
    service = TIERS["docker"].start(slots=1, env=docker_environment)
    try:
        async with SandboxClient(service.url, TOKEN) as client:
            health = await client.health()
            assert (health.backend, "no network" in health.isolation) == ("docker", True)
            assert wait_until(lambda: len(containers(docker_environment)) == 1, 20)
            [details] = json.loads(docker(docker_environment, "inspect", *containers(docker_environment)))
    finally:
        stop_service(service)
    host, config = details["HostConfig"], details["Config"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == ("none", True, False)
    assert (host["CapDrop"], host["CapAdd"], host["Binds"], details["Mounts"]) == (["ALL"], None, None, [])
    assert "no-new-privileges" in host["SecurityOpt"][0]
    assert host["PidsLimit"] == 33 and host["Memory"] == host["MemorySwap"] > 0 and host["NanoCpus"] == 10**9
    assert host["LogConfig"]["Type"] == "none"
    assert int(config["User"].split(":")[0]) >= uids.FIRST_UID
    assert not any("TOKEN" in entry or "SECRET" in entry for entry in config["Env"])


TOUCH_PID_1 = """
import os
reached = []
for number in range(64):
    for flag in (os.O_RDONLY, os.O_WRONLY):
        try: reached.append(os.open(f'/proc/1/fd/{number}', flag))
        except OSError: pass
for name in ('mem', 'environ', 'maps', 'auxv', 'cwd', 'root'):
    try: reached.append(os.open(f'/proc/1/{name}', os.O_RDONLY))
    except OSError: pass
for signum in range(1, 65):
    os.kill(1, signum)
reached
"""


async def test_pid_1_is_out_of_a_programs_reach(docker_environment: dict[str, str]) -> None:
    service = TIERS["docker"].start(slots=1, env=docker_environment)
    try:
        async with SandboxClient(service.url, TOKEN) as client, client.session() as session:
            assert (await session.exec(TOUCH_PID_1)).result == "[]"
            after = await session.exec("import os; sorted(os.environ)")
            assert not after.state_lost
            allowed = {*isolate.ENVIRONMENT, "PATH", "PYTHONPATH", "HOSTNAME"}
            assert set(json.loads((after.result or "").replace("'", '"'))) <= allowed
    finally:
        stop_service(service)


@contextlib.asynccontextmanager
async def line_to_the_engine(target: str, path: Path) -> AsyncIterator[asyncio.Event]:
    """A socket at `path` that leads to the engine's until the event is set."""
    cut = asyncio.Event()
    lines: set[asyncio.StreamWriter] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(target)
        lines.update((writer, there_writer))
        await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))

    async def hang_up() -> None:
        await cut.wait()
        server.close()
        path.unlink()
        for writer in lines:
            writer.transport.abort()

    server = await asyncio.start_unix_server(connection, path)
    hanging_up = asyncio.create_task(hang_up())
    yield cut
    cut.set()
    await hanging_up


async def test_an_engine_that_stops_is_named(docker_environment: dict[str, str], tmp_path: Path) -> None:
    before = set(containers(docker_environment))
    target = docker_environment.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    path = tmp_path / "engine.sock"
    async with line_to_the_engine(target, path) as cut:
        environment = docker_environment | {"DOCKER_HOST": f"unix://{path}"}
        service = await asyncio.to_thread(TIERS["docker"].start, slots=1, env=environment)
        try:
            async with SandboxClient(service.url, TOKEN) as client, client.session() as session:
                assert (await session.exec("6 * 7")).result == "42"
                cut.set()
                await asyncio.sleep(0.5)
                with pytest.raises(SandboxUnavailable, match=r"a container could not be started: .*No such file"):
                    await session.exec("6 * 7")
                assert (await client.health()).backend == "docker"
        finally:
            await asyncio.to_thread(stop_service, service)
    assert wait_until(lambda: set(containers(docker_environment)) <= before, 20)


async def test_what_a_killed_service_had_not_started_is_swept(
    docker_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = docker(docker_environment, "create", "--label", "agentrl.sandbox=killed", IMAGE)
    monkeypatch.setattr(docker_backend, "LEFTOVER_AGE_S", 2.0)
    for name, value in docker_environment.items():
        monkeypatch.setenv(name, value)
    backend = docker_backend.DockerBackend(BackendSettings())
    await backend.start()
    assert left[:12] in containers(docker_environment)  # it might belong to another service that is about to start
    await backend.stop()
    time.sleep(3)
    await backend.start()
    await backend.stop()
    assert left[:12] not in containers(docker_environment)


def refused(environment: Mapping[str, str], *flags: str) -> str:
    """The message of a service that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "sandbox", "--port", "0", "--backend", "docker", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "host", "message"),
    [
        (["--image", "no-such-image"], None, "docker build -t no-such-image -f sandbox/Dockerfile ."),
        ([], "unix:///tmp/no-such-engine.sock", "no Docker engine answers at unix:///tmp/no-such-engine.sock"),
    ],
)
def test_what_is_missing_is_named(
    docker_environment: dict[str, str], flags: list[str], host: str | None, message: str
) -> None:
    environment = docker_environment | ({"DOCKER_HOST": host} if host else {})
    assert message in refused(environment, *flags)


def test_an_image_of_another_version_is_refused(docker_environment: dict[str, str]) -> None:
    edit = "sed -i 's/^PROTOCOL_VERSION = .*/PROTOCOL_VERSION = 0/' /opt/sandbox/sandbox/backends/muxing.py"
    older = f"FROM {IMAGE}\nRUN {edit}\n"
    subprocess.run(
        ["docker", "build", "-q", "-t", f"{IMAGE}:older", "-"],
        input=older.encode(),
        env=docker_environment,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert "build the image again" in refused(docker_environment, "--image", f"{IMAGE}:older")
