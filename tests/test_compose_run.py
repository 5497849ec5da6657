"""`docker compose up`, and nothing else: a whole run in containers, down to report.html on the host.

The image is the Dockerfile's, with this environment's packages mounted into it instead of 4 GB installed. The tests
tell one story and run in this order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentrl.report.metrics import read
from agentrl.supervision.serving import free_port
from sandbox.client import SandboxClient

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[1]
OWNER = 1234
"""User id that owns the run's folder. No account has it, neither on this machine nor in the image."""
PARTS = ("warmstart", "engine", "orchestrator", "learner")
IMAGE = "agentrl-mounted"
ENDLESS = 100_000
STOP_WITHIN_S = 25.0
ENV = """
from agentrl.types import Message


class Shown(EvenLength):
    @classmethod
    def demonstrations(cls, task, *, skill=1.0, seed=0):
        return [Message(role="assistant", content="Even. " if int(task.id[-1]) % 2 else "Odd.")]
"""
CONFIG: dict[str, Any] = {
    "name": "composed",
    "env": {"target": "configs/shown.py:Shown"},
    "model": {
        "path": "models/tiny",
        "warmstart": {
            **{"vocab_size": 384, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
            **{"intermediate_size": 128, "demonstrations": 16, "steps": 4},
        },
    },
    "rollout": {"groups_per_step": 2, "group_size": 4, "max_context": 640, "max_turn_tokens": 16},
    "engine": {"max_num_seqs": 16, "kv_cache_bytes": 67_108_864, "start_timeout_s": 400},
    "learner": {"lr": 1e-4, "checkpoint_every": 2, "start_timeout_s": 400},
    "eval": {"num_tasks": 2, "samples_per_task": 2},
}
REACHED = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor

def reached(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3)
        return address
    except OSError:
        return None

print(*filter(None, ThreadPoolExecutor(len(sys.argv)).map(reached, sys.argv[1:])))
"""
CALL = """
import sys, urllib.error, urllib.request
token, *urls = sys.argv[1:]
for url in urls:
    request = urllib.request.Request(url, headers={"authorization": "Bearer " + token} if token else {})
    try:
        print(urllib.request.urlopen(request, timeout=5).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A compose project started from a folder of its own."""

    folder: Path
    environment: dict[str, str]
    name: str
    port: int

    def compose(self, *arguments: str, steps: int = ENDLESS, timeout_s: float = 900) -> str:
        files = [ROOT / "docker-compose.yml", self.folder / "override.json"]
        command = ["docker", "compose", "--project-name", self.name]
        command += [word for file in files for word in ("--file", str(file))]
        return self.run(*command, *arguments, timeout_s=timeout_s, AGENTRL_OVERRIDES=f"train.steps={steps}")

    def run(self, *command: str, timeout_s: float = 60, **variables: str) -> str:
        environment = {**self.environment, **variables}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout.strip()

    def containers(self, service: str) -> list[dict[str, Any]]:
        """`docker inspect` of each container of a service."""
        label = "label=com.docker.compose"
        filters = ("--filter", f"{label}.project={self.name}", "--filter", f"{label}.service={service}")
        ids = self.run("docker", "ps", "--all", "--quiet", *filters).split()
        return list(json.loads(self.run("docker", "inspect", *ids))) if ids else []

    def container(self, service: str) -> dict[str, Any]:
        [container] = self.containers(service)
        return container

    def python(self, service: str, code: str, *arguments: str) -> str:
        """Run Python code in a container of that service, as the user of its program; return the output."""
        user = str(OWNER) if service in PARTS else "0"
        container = self.containers(service)[0]["Id"]
        return self.run("docker", "exec", "--user", user, container, "python3", "-c", code, *arguments)

    def token(self, name: str, service: str) -> str:
        path = f"/run/tokens/{name}/token"
        return self.python(service, f"print(open({path!r}).read())")

    def address(self, service: str, network: str = "run") -> str:
        networks = self.container(service)["NetworkSettings"]["Networks"]
        return str(networks[f"{self.name}_{network}"]["IPAddress"])

    @property
    def events(self) -> Path:
        return self.folder / "events"

    def first_healthy(self, service: str) -> datetime:
        """Time at which a container of the service first was healthy."""
        events = [json.loads(line) for line in self.events.read_text().splitlines()]
        return min(
            datetime.fromtimestamp(event["timeNano"] / 1e9, UTC)
            for event in events
            if event["Action"] == "health_status: healthy"
            and event["Actor"]["Attributes"]["com.docker.compose.service"] == service
        )

    @property
    def latest(self) -> Path:
        return self.folder / "runs" / "latest"

    def step(self) -> int:
        """Number of the last step in metrics.jsonl."""
        if not (self.latest / "metrics.jsonl").exists():
            return 0
        return max((line.step for line in read(self.latest / "metrics.jsonl") if line.kind == "step"), default=0)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.compose("logs", "--tail", "60", *PARTS[1:])
            time.sleep(0.2)


@pytest.fixture(scope="module")
def project(docker_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("compose")
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)  # pytest's own are closed to others
    port = free_port()
    (folder / "configs").mkdir()
    (folder / "configs" / "composed.yaml").write_text(json.dumps(CONFIG))
    (folder / "configs" / "shown.py").write_text((ROOT / "tests/e2e/parity_env.py").read_text() + ENV)
    (folder / "override.json").write_text(json.dumps({"services": _overrides(folder)}))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OWNER, OWNER)
    environment = {
        **os.environ,
        **docker_environment,
        "AGENTRL_CONFIG": "configs/composed.yaml",
        "AGENTRL_SANDBOX_PORT": str(port),
        "COMPOSE_PROFILES": "cpu",
    }
    project = Project(folder=folder, environment=environment, name=f"agentrl-run-{os.getpid()}", port=port)
    try:
        with _events(project):
            project.compose("up", "--build", "--detach", "--scale", "sandbox=2")
            yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "5")
    label = f"label=com.docker.compose.project={project.name}"
    assert project.run("docker", "ps", "--all", "--quiet", "--filter", label) == ""
    assert project.run("docker", "volume", "ls", "--quiet", "--filter", label) == ""


def _overrides(folder: Path) -> dict[str, Any]:
    """Compose overrides: the test's folders instead of the checkout's, and packages mounted instead of installed."""
    packages = f"{sysconfig.get_paths()['purelib']}:/usr/local/lib/python3.11/site-packages:ro"
    mounted = {
        "setup": ("configs", "models", "runs"),
        **dict.fromkeys(("warmstart", "engine"), ("configs", "models")),
        **dict.fromkeys(("orchestrator", "learner"), ("configs", "models", "runs")),
    }
    services: dict[str, Any] = {
        name: {"volumes": [f"{folder}/{sub}:/work/{sub}" + (":ro" if sub == "configs" else "") for sub in subs]}
        for name, subs in mounted.items()
    }
    for name in PARTS:
        services[name]["volumes"].append(packages)
        services[name] |= {"image": IMAGE, "build": {"args": {"PACKAGES": "mounted"}}}
    return services


def test_a_plain_up_takes_the_cpu_and_the_gpu_profile_all_gpus(docker_environment: dict[str, str]) -> None:
    environment = {**os.environ, **docker_environment}

    def services(*arguments: str, **variables: str) -> dict[str, Any]:
        command = ["docker", "compose", *arguments, "config", "--format", "json"]
        env = {**environment, **variables}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
        return dict(json.loads(done.stdout)["services"])

    def devices(service: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = service.get("deploy", {}).get("resources", {}).get("reservations", {})["devices"]
        return found

    common = {"setup", "sandbox", "sandbox-port"}
    assert set(services()) == common | set(PARTS)
    found = services("--profile", "gpu", AGENTRL_WEIGHTS_MEMORY="48g")
    assert set(found) == common | {"train-gpu"}
    train = found["train-gpu"]
    assert (train["image"], train["build"]["target"]) == ("agentrl-gpu", "gpu")
    assert set(train["depends_on"]) == {"sandbox-port"} and set(train["networks"]) == {"front"}
    assert int(train["shm_size"]) == 48 * 2**30
    assert train["cap_drop"] == ["ALL"] and train["read_only"]
    assert devices(train) == [{"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}]  # -1: all
    [two] = devices(services("--profile", "gpu", AGENTRL_GPUS="2")["train-gpu"])
    assert two["count"] == 2


@contextmanager
def _events(project: Project) -> Iterator[None]:
    """Record Docker's health events in a file: Docker itself keeps only the last five of a container."""
    command = ["docker", "events", "--filter", f"label=com.docker.compose.project={project.name}"]
    command += ["--filter", "event=health_status", "--format", "{{json .}}"]
    with project.events.open("w") as file:
        listener = subprocess.Popen(command, env=project.environment, stdout=file)
    try:
        yield
    finally:
        listener.terminate()
        listener.wait(10)


def test_the_whole_stack_comes_up_in_order_and_trains(project: Project) -> None:
    project.wait_for(lambda: project.step() >= 2, 200)
    project.wait_for(lambda: project.container("learner")["State"]["Health"]["Status"] == "healthy", 30)
    started = {name: _time(project.containers(name)[0]["State"]["StartedAt"]) for name in ("sandbox-port", *PARTS)}
    health = project.first_healthy
    assert health("sandbox") <= started["sandbox-port"]
    assert health("sandbox-port") <= started["warmstart"]
    assert _time(project.container("warmstart")["State"]["FinishedAt"]) <= started["engine"]
    assert health("engine") <= started["orchestrator"]
    assert health("orchestrator") <= started["learner"] <= health("learner")
    assert len(project.containers("sandbox")) == 2


def _time(text: str) -> datetime:
    """Parse a time of Docker, which has nanoseconds."""
    return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00")


async def test_a_session_reaches_nothing(project: Project) -> None:
    addresses = [("1.1.1.1", 53), (project.address("engine"), 8000), (project.address("orchestrator"), 8400)]
    addresses += [("sandbox-port", 8321), ("engine", 8000), ("172.17.0.1", 22)]
    code = f"""
import socket
reached = []
for address in {addresses!r}:
    try:
        socket.create_connection(address, 2)
        reached.append(address)
    except OSError:
        pass
reached"""
    token = project.token("sandbox", "sandbox")
    async with SandboxClient(f"http://127.0.0.1:{project.port}", token) as client, client.session() as session:
        assert (await session.exec(code, timeout_s=30)).result == "[]"


def test_nor_does_the_sandbox_s_own_container(project: Project) -> None:
    ports = {"engine": 8000, "orchestrator": 8400, "learner": 29500}
    targets = [f"{project.address(name)}:{port}" for name, port in ports.items()]
    targets += [f"{name}:{port}" for name, port in ports.items()]
    targets += [f"{project.address('orchestrator', 'front')}:8400", f"{project.address('sandbox-port', 'front')}:8321"]
    with socket.socket() as ours:  # a port of this machine
        ours.bind(("0.0.0.0", 0))
        ours.listen()
        gateways = ("front", "run", "sandbox")
        form = "{{(index .IPAM.Config 0).Gateway}}"
        for network in gateways:
            gateway = project.run("docker", "network", "inspect", f"{project.name}_{network}", "--format", form)
            targets.append(f"{gateway}:{ours.getsockname()[1]}")
        assert project.python("sandbox", REACHED, *targets, "1.1.1.1:443", "169.254.169.254:80") == ""
    assert (
        project.python("orchestrator", REACHED, "engine:8000", "sandbox-port:8321") == "engine:8000 sandbox-port:8321"
    )


def test_each_token_is_known_to_its_two_ends_only(project: Project) -> None:
    known = {}
    for service in ("sandbox", "sandbox-port", "engine", "orchestrator", "learner"):
        mounts = project.containers(service)[0]["Mounts"]
        known[service] = {
            mount["Destination"].split("/")[-1] for mount in mounts if "/run/tokens/" in mount["Destination"]
        }
    assert known == {
        **{"sandbox": {"sandbox"}, "sandbox-port": set(), "engine": {"engine"}, "learner": {"learner"}},
        "orchestrator": {"sandbox", "engine", "learner"},
    }
    secrets = {project.token(name, "orchestrator") for name in ("sandbox", "engine", "learner")}
    assert len(secrets) == 3 and min(map(len, secrets)) >= 32
    shown = json.dumps([project.containers(name) for name in ("setup", "sandbox", *PARTS)])
    assert not any(secret in shown for secret in secrets)


def test_no_listener_answers_without_its_token(project: Project) -> None:
    engine = [f"http://engine:8000/{path}" for path in ("pause", "v1/models", "weight_info", "metrics")]
    assert project.python("learner", CALL, "", *engine).split() == ["401"] * len(engine)
    assert project.python("orchestrator", CALL, project.token("engine", "engine"), engine[2]) == "200"
    assert project.python("engine", CALL, "", "http://orchestrator:8400/v1/batch?policy_version=0") == "401"


def test_the_parts_are_hardened_and_belong_to_whoever_started_them(project: Project) -> None:
    for service in ("engine", "orchestrator", "learner"):
        container = project.container(service)
        host = container["HostConfig"]
        assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
        status = Path(f"/proc/{container['State']['Pid']}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == [str(OWNER)] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0


def test_a_learner_that_is_killed_comes_back_and_the_run_goes_on(project: Project) -> None:
    project.wait_for(lambda: any(project.latest.glob("checkpoints/states/v*")), 60)
    reached = project.step()
    os.kill(project.container("learner")["State"]["Pid"], signal.SIGKILL)
    project.wait_for(lambda: project.step() >= reached + 3, 150)
    assert project.container("learner")["RestartCount"] == 1
    assert project.container("orchestrator")["RestartCount"] == 0
    assert "--resume" in project.run("docker", "top", project.container("learner")["Id"], "-ww", "-o", "pid,args")


def test_it_stops_within_seconds_and_goes_on_to_its_report(project: Project) -> None:
    started = time.monotonic()
    project.compose("stop")
    stopped_s = time.monotonic() - started
    reached, folder = project.step(), project.latest.resolve()
    assert (folder / "report.html").exists()  # also of a run that was cut off
    project.compose("up", "--detach", steps=reached + 2)
    project.wait_for(lambda: project.container("orchestrator")["State"]["Status"] == "exited", 200)
    project.wait_for(lambda: project.container("learner")["State"]["Status"] == "exited", 30)
    assert [project.container(name)["State"]["ExitCode"] for name in ("orchestrator", "learner")] == [0, 0]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["composed", "latest"]  # no second run
    steps = [line.step for line in read(folder / "metrics.jsonl") if line.kind == "step"]
    assert steps == list(range(1, reached + 3))
    assert stopped_s < STOP_WITHIN_S


def test_the_run_lies_on_the_host_and_is_the_owner_s(project: Project) -> None:
    folder = project.latest.resolve()
    assert "composed" in (folder / "report.html").read_text()
    assert (folder / "checkpoints" / "final" / "model.safetensors").exists()
    for path in (folder.parent, *folder.rglob("*"), project.folder / "models" / "tiny"):
        assert path.lstat().st_uid == OWNER, path
