"""`agentrl train` and `agentrl eval` with an agent that brings its own loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.types import StopReason
from tests.device import engine_settings

if TYPE_CHECKING:
    from tests.conftest import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]

ENV_FILE = Path(__file__).parent / "black_box_env.py"


def agentrl(*arguments: str | Path, timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrl", *map(str, arguments)]
    variables = {**os.environ, "COLUMNS": "160", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=variables)


def write_config(folder: Path, env: str, model: Path | str, **sections: Any) -> Path:
    config = {
        "name": "black-box",
        "out_dir": str(folder / "runs"),
        "env": {"target": f"{ENV_FILE}:{env}"},
        "model": {"path": str(model)},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_context": 384, "max_turn_tokens": 32},
        "engine": engine_settings(max_num_seqs=16),
        "learner": {"lr": 1e-3},
        "eval": {"num_tasks": 4, "samples_per_task": 2},
        "train": {"steps": 2},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({**config, **sections}))
    return path


@pytest.fixture
def shared(vllm_server: VLLMServer, tiny_model_dir: Path) -> Iterator[VLLMServer]:
    """The session's server. It gets its first weights back after the test."""
    yield vllm_server
    with httpx.Client(base_url=vllm_server.url, timeout=60) as http:
        http.post("/pause", params={"mode": "keep", "clear_cache": True}).raise_for_status()
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"path": str(tiny_model_dir)}}),
            ("/finish_weight_update", {"weight_version": "0"}),
            ("/resume", {}),
        ):
            http.post(path, json=body).raise_for_status()


def test_somebody_elses_loop_is_trained(tmp_path: Path, tiny_model_dir: Path, shared: VLLMServer) -> None:
    done = agentrl("train", write_config(tmp_path, "Even", tiny_model_dir, engine={"url": shared.url}))
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder.open(tmp_path / "runs" / "black-box")
    steps = [line for line in read(run.metrics) if line.kind == "step"]
    assert [line.step for line in steps] == [1, 2]
    assert all(line.values["learner/grad_norm"] > 0 for line in steps)
    assert all(line.values.get("learner/parity_max_abs", 0) < 1e-3 for line in steps)
    for group in run.read_trajectories(2):
        ids = [trajectory.id for trajectory in group.trajectories]
        assert ids == [f"train-{group.group_id}-{m}.{s}" for m in range(4) for s in range(2)]
        for whole, fork in zip(group.trajectories[::2], group.trajectories[1::2], strict=True):
            assert (len(whole.turns), len(fork.turns)) == (2, 1)
            assert whole.reward == fork.reward
            assert whole.stop_reason is StopReason.COMPLETED
            assert fork.messages[0].content == "You end."
            assert all(turn.completion.version_spans for turn in (*whole.turns, *fork.turns))


def test_a_program_is_measured_on_a_running_server(
    tmp_path: Path, vllm_server: VLLMServer, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, "EvenProgram", "unused")
    done = agentrl("eval", config, "--model", vllm_server.url, "--tokenizer", tiny_model_dir, "-n", "1", "--limit", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tasks, 1 samples each" in done.stdout
    assert "completed 2" in done.stdout


def test_any_chat_endpoint_is_measured(tmp_path: Path, vllm_server: VLLMServer) -> None:
    config = write_config(tmp_path, "EvenTurn", "unused")
    command = ("eval", config, "--model", f"{vllm_server.url}/v1", "--served-model", vllm_server.model, "-n", "2")
    done = agentrl(*command, "--api-key-env", "MY_KEY", MY_KEY="sk-anything")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 tasks, 2 samples each" in done.stdout
    assert "avg@2" in done.stdout and "pass@2" in done.stdout
    assert "sk-anything" not in done.stdout + done.stderr


def test_a_name_that_is_not_served_is_told_with_the_mend(tmp_path: Path, vllm_server: VLLMServer) -> None:
    config = write_config(tmp_path, "EvenTurn", "unused")
    done = agentrl("eval", config, "--model", f"{vllm_server.url}/v1", "--served-model", "gpt-none")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "gpt-none" in done.stderr and "served name" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    done = agentrl("eval", config, "--model", "somewhere", "--served-model", "gpt-none")
    assert done.returncode == 2
    assert "--model https://" in done.stderr
