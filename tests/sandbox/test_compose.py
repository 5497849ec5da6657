"""`docker compose up sandbox-port` for real: it answers on this machine, and reaches nothing from where it runs.

The other services have tests/test_compose_run.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from agentrl.supervision.serving import free_port
from sandbox.client import SandboxClient
from tests.docker_engine import IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.docker]

ROOT = Path(__file__).parents[2]
CONNECT = (
    "import socket, sys\n"
    "for address in (('1.1.1.1', 53), ('169.254.169.254', 80), (sys.argv[1], int(sys.argv[2])), ('172.17.0.1', 22)):\n"
    "    try: socket.create_connection(address, 3)\n"
    "    except OSError: continue\n"
    "    print('reached', address)\n"
)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A running compose project."""

    environment: dict[str, str]
    name: str
    url: str

    def docker(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def compose(self, *arguments: str) -> str:
        return self.docker("compose", "--project-name", self.name, *arguments)

    def container(self, service: str) -> str:
        return self.compose("ps", "--quiet", service)


@pytest.fixture(scope="module")
def project(docker_environment: dict[str, str]) -> Iterator[Project]:
    port = free_port()
    environment = {
        **os.environ,
        **docker_environment,
        "AGENTRL_SANDBOX_TOKEN": "token-of-compose",
        "AGENTRL_SANDBOX_PORT": str(port),
    }
    project = Project(environment=environment, name=f"agentrl-test-{os.getpid()}", url=f"http://127.0.0.1:{port}")
    try:
        project.compose("up", "--detach", "--wait", "sandbox-port")
        yield project
    finally:
        project.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={project.name}"
    assert project.docker("ps", "--all", "--quiet", "--filter", label) == ""
    assert project.docker("network", "ls", "--quiet", "--filter", label) == ""


async def test_it_answers_on_this_machine(project: Project) -> None:
    async with SandboxClient(project.url, "token-of-compose") as client, client.session() as session:
        health = await client.health()
        assert (health.backend, "signals" in health.isolation) == ("landlock", True)
        assert (await session.exec("import numpy, sympy; sympy.factorint(2024)")).result == "{2: 3, 11: 1, 23: 1}"
        assert (
            await session.exec("import os; os.getuid() > 10**9, os.environ.get('AGENTRL_SANDBOX_TOKEN')")
        ).result == ("(True, None)")
        await session.put_file("folder/in", b"x")
        assert await session.get_file("folder/in") == b"x"
    assert httpx.post(f"{project.url}/run_code", json={"code": "1"}).status_code == 401


async def test_hostile_programs_are_survived_inside(project: Project) -> None:
    programs = {
        "while True: pass": {"timeout"},
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass": {"timeout", "oom"},
        "x = []\nwhile True: x.append(b'x' * 10**7)": {"error", "oom"},
        "n = 0\nwhile True:\n  open(f'f{n}', 'wb').write(b'x' * 10**6); n += 1": {"oom"},
        "import os; os.mkdir('d', 0); os._exit(0)": {"crashed"},
        "import socket; socket.create_connection(('sandbox', 8321))": {"error"},
        "import os; os.kill(1, 9)": {"error"},
        "open('/proc/1/environ').read()": {"error"},
    }
    async with SandboxClient(project.url, "token-of-compose") as client:
        for code, statuses in programs.items():
            async with client.session() as session:
                timeout_s = 2 if "timeout" in statuses else 60
                assert (await session.exec(code, timeout_s=timeout_s)).status in statuses, code
                assert (await session.exec("6 * 7")).result == "42"
    left = project.docker("exec", project.container("sandbox"), "sh", "-c", "sleep 1; ls /tmp")
    assert len(left.split()) <= 8 + 1  # the folders of the warm interpreters


def test_nothing_can_be_reached_from_it(project: Project) -> None:
    with socket.socket() as ours:  # a port of the host, as the trainer's or the engine's would be
        ours.bind(("0.0.0.0", 0))
        ours.listen()
        gateway = project.docker(
            "network", "inspect", f"{project.name}_sandbox", "--format", "{{(index .IPAM.Config 0).Gateway}}"
        )
        port = str(ours.getsockname()[1])
        said = project.docker("exec", project.container("sandbox"), "python", "-c", CONNECT, gateway, port)
    assert said == ""


def test_its_container_is_hardened(project: Project) -> None:
    for service, added in (("sandbox", {"SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "KILL"}), ("sandbox-port", set())):
        [details] = json.loads(project.docker("inspect", project.container(service)))
        host = details["HostConfig"]
        assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
        assert {name.removeprefix("CAP_") for name in host["CapAdd"] or []} == added
        mounts = [(mount["Type"], mount["Destination"], mount["RW"]) for mount in details["Mounts"]]
        # nothing of the host, docker.sock least of all
        assert mounts == ([("volume", "/run/tokens/sandbox", False)] if service == "sandbox" else [])
        assert host["PidsLimit"] > 0 and host["Memory"] > 0
        assert "no-new-privileges:true" in host["SecurityOpt"]


def test_a_token_is_made_where_none_is_given_and_stays(project: Project) -> None:
    read = ("exec", project.container("sandbox"), "cat", "/run/tokens/sandbox/token")
    assert project.docker(*read) == "token-of-compose"
    project.environment["AGENTRL_SANDBOX_TOKEN"] = ""
    project.compose("run", "--rm", "setup")
    assert project.docker(*read) == "token-of-compose"  # running services keep it
    project.docker("exec", project.container("sandbox"), "true")
    elsewhere = replace(project, name=f"{project.name}-2")
    try:
        elsewhere.compose("run", "--rm", "setup")
        made = elsewhere.docker(
            "run",
            "--rm",
            "--entrypoint",
            "cat",
            "--volume",
            f"{elsewhere.name}_sandbox-token:/token:ro",
            IMAGE,
            "/token/token",
        )
        assert len(made) >= 32
    finally:
        elsewhere.compose("down", "--volumes")
