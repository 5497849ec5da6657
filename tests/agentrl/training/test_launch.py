"""Ports and folders that a run claims and releases; the sandbox that its config asks for."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from agentrl.config import Config, load
from agentrl.errors import ConfigError
from agentrl.report.console import TrainConsole
from agentrl.supervision.child import ChildDied
from agentrl.supervision.serving import configured_port
from agentrl.training.launch import (
    WEIGHTS_PREFIX,
    _progress_or_log,
    learner_command,
    learner_environment,
    sandbox_ready,
    sandbox_service,
    weights_folder,
)
from agentrl.training.run import Training
from sandbox.client import SandboxClient
from tests.agentrl.conftest import pretend_gpus
from tests.agentrl.training.troubles import Trouble
from tests.agentrl.training.whole_run import make_config

TAKEN = Trouble("...: cannot listen on ...: Address already in use. Choose another, or 0 for any free port")


def test_a_taken_port_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine\.port: cannot listen on 127\.0\.0\.1:{port}") as found:
            configured_port("127.0.0.1", port, key="engine.port")
    assert TAKEN.is_in(found.value)


def test_the_weights_folder_goes_with_the_run_and_sweeps_what_dead_runs_left(tmp_path: Path) -> None:
    with weights_folder(tmp_path) as folder:
        dead = folder.parent / f"{WEIGHTS_PREFIX}999999999-left"
        dead.mkdir()
        with weights_folder(tmp_path) as second:
            assert not dead.exists()
            assert folder.exists() and second != folder
            assert str(os.getpid()) in folder.name
    assert not folder.exists()


def test_weights_for_an_engine_on_another_machine_lie_in_the_runs_folder(tmp_path: Path) -> None:
    with weights_folder(tmp_path, urls=["http://127.0.0.1:8000", "http://node-2:8000"]) as folder:
        assert folder.parent == tmp_path.resolve()
    with weights_folder(tmp_path, urls=["http://localhost:8000"]) as folder:
        assert folder.parent == Path("/dev/shm")


@pytest.mark.parametrize(("num_gpus", "transfer"), [(1, "ipc"), (2, "nccl")])
def test_the_learner_is_told_its_gpu_and_whether_an_engine_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, transfer: str
) -> None:
    pretend_gpus(monkeypatch, num_gpus)
    command = learner_command(
        make_config(tmp_path),
        config_path=tmp_path / "config.json",
        orchestrator_url="http://127.0.0.1:8400",
        weights_dir=tmp_path,
        run_dir=tmp_path,
    )
    assert ("--shares-gpu" in command) == (num_gpus == 1)
    assert command[command.index("--weight-transfer") + 1] == transfer
    assert learner_environment(make_config(tmp_path))["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_run_that_does_not_fit_on_the_gpus_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    overrides = [f"out_dir={tmp_path}", "learner.num_ranks=2"]
    config = load(Path(__file__).parents[3] / "configs" / "quickstart.yaml", overrides)
    with pytest.raises(ConfigError, match=r"needs 3 GPUs .* sees 2 GPUs: set learner.num_ranks=1"):
        Training(config, TrainConsole(total_steps=1))
    elsewhere = load(Path(__file__).parents[3] / "configs" / "quickstart.yaml", [*overrides, "engine.url=http://a:1"])
    Training(elsewhere, TrainConsole(total_steps=1), learner_at=("127.0.0.1", 0))  # both parts have their own machine


def test_what_a_library_prints_between_progress_goes_to_the_log(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    on_line = _progress_or_log(lambda done, total: seen.append((done, total)), tmp_path / "warmstart.log")
    for line in ("[1, 20]", "[2026-11-21 15:29:12,816] [WARNING] Setting accelerator to CPU", "7", "[2, 20]"):
        on_line(line)
    assert seen == [(1, 20), (2, 20)]
    assert (tmp_path / "warmstart.log").read_text().splitlines()[1:] == ["7"]


async def served_by(tmp_path: Path, **settings: object) -> str:
    """The backend of the sandbox that a run with these settings starts. It has run a program by then."""
    tree = {"name": "n", "env": {"target": "ModMath-v0"}, "model": {"path": "m"}, "sandbox": {"slots": 1, **settings}}
    async with sandbox_service(Config.model_validate(tree), logs=tmp_path, token="secret") as (client, parts):
        await sandbox_ready(client, parts, max_restarts=0)
        async with client.session() as session:
            assert (await session.exec("6 * 7", timeout_s=30)).result == "42"
        return (await client.health()).backend


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
async def test_a_run_starts_the_sandbox_with_the_backend_of_its_config(tmp_path: Path, backend: str) -> None:
    try:
        assert await served_by(tmp_path, backend=backend) == backend
    except ChildDied as error:
        assert f"no sandbox can run here: {backend}: " in str(error)
        pytest.skip(str(error).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.docker
async def test_a_run_starts_the_docker_backend(
    tmp_path: Path, docker_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in docker_environment.items():
        monkeypatch.setenv(name, value)
    assert await served_by(tmp_path, backend="docker") == "docker"


async def test_a_run_does_not_start_the_unsafe_backend_unless_that_is_permitted(tmp_path: Path) -> None:
    with pytest.raises(ChildDied, match="starts only with --allow-unsafe"):
        await served_by(tmp_path, backend="unsafe")
    assert await served_by(tmp_path, backend="unsafe", allow_unsafe=True) == "unsafe"


async def test_a_sandbox_folder_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sandbox").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / "sandbox" / name).write_text("raise SystemExit('ran from the working directory')")
    monkeypatch.chdir(tmp_path)
    assert await served_by(tmp_path, backend="unsafe", allow_unsafe=True) == "unsafe"
    async with SandboxClient.embedded("unsafe", slots=1, allow_unsafe=True) as client:
        assert (await client.health()).backend == "unsafe"
    command = [sys.executable, "-P", "-m", "agentrl", "sandbox", "--help"]  # as the console script: -P
    done = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    shown, errors = await done.communicate()
    assert done.returncode == 0 and b"--allow-unsafe" in shown, errors
