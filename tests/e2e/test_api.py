"""The examples of the Python API as they are, with a small model: one real run, trained by a cell of a notebook.

`agentrl train`, with its resume and its Ctrl-C, calls the same function: tests/e2e/test_train.py.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import engine_settings

if TYPE_CHECKING:
    from tests.conftest import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 3
# A notebook's kernel executes a cell while its own event loop runs.
CELL = """
import asyncio, json, os, runpy, sys

async def cell():
    names = runpy.run_path(sys.argv[1], run_name="cell")
    if len(sys.argv) > 2:
        result = names["main"](**json.loads(sys.argv[2]))
        print("RESULT", json.dumps({name: str(getattr(result, name)) for name in result.__slots__}))

asyncio.run(cell())
"""


def settings(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "name": "quickstart",
        "out_dir": str(folder / "runs"),
        "env": {"target": f"{Path(__file__).parent / 'kill_env.py'}:EvenTotal"},
        "model": {"path": str(model)},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_context": 384, "max_turn_tokens": 32},
        "engine": engine_settings(max_num_seqs=16),
        "learner": {"lr": 1e-3, "save_every": 2},
        "eval": {"num_tasks": 4, "samples_per_task": 2},
        "train": {"steps": 500},
    }


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    path = tmp_path_factory.mktemp("api") / "config.yaml"
    path.write_text(json.dumps(settings(path.parent, tiny_model_dir)))
    return path


def execute(folder: Path, example: str, *arguments: str) -> str:
    """What the example printed as a cell of a notebook that runs in `folder`."""
    command = [sys.executable, "-c", CELL, str(EXAMPLES / example), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def example(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_cell_trains_and_other_cells_read_its_run(config: Path) -> None:
    said = execute(
        config.parent, "train.py", json.dumps({"config": str(config), "overrides": [f"train.steps={STEPS}"]})
    )
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step ")] == ["step 1", "step 2", "step 3"]
    assert {"starting the sandbox", "starting the engine (vLLM)"} <= set(lines)
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert result["steps"] == str(STEPS) and float(result["minutes"]) > 0 and result["note"] == ""
    assert Path(result["folder"]) == config.parent / "runs" / "quickstart"
    assert Path(result["report"]).is_file() and Path(result["checkpoint"], "model.safetensors").is_file()

    read = execute(config.parent, "notebook.py")
    assert read.splitlines()[:2] == ["True", "The run is done"] and f"of version {STEPS}" in read
    example("read_run.py")(result["folder"])


@pytest.mark.engine
def test_a_model_is_measured_and_plays(
    config: Path, vllm_server: VLLMServer, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"model": vllm_server.url, "tokenizer": str(tiny_model_dir)}
    average = example("evaluate.py")(str(config), samples=2, **model)
    said = capsys.readouterr().out
    assert 0 <= average <= 1 and f"avg@2 {average:.3f} [" in said and "pass@2" in said and "never solved:" in said
    assert example("rollout.py")(str(config), **model) == 4
    said = capsys.readouterr().out
    assert said.count("-- reward") == 4 and "== test-1: Write. 1" in said and "starting" not in said


def test_an_environment_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("check_env.py")("envs.modmath:ModMath", limit=2) is True
    assert "FAIL" not in capsys.readouterr().out
