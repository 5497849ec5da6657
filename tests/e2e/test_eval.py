"""`agentrl eval` against a running server: real rows, real sandbox, numbers with intervals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(300)]

CONFIG = {
    "name": "measured",
    "env": {"target": "envs.aime:AimePython"},
    "model": {"path": "unused"},
    "rollout": {"max_context": 768, "max_turn_tokens": 32},
}
ROWS = [{"id": "a", "problem": "What is 1 + 1?", "answer": "2"}, {"id": "b", "problem": "Say 025.", "answer": "025"}]


def evaluate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    config, rows = folder / "config.yaml", folder / "rows.jsonl"
    config.write_text(json.dumps(CONFIG))
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    command = [sys.executable, "-m", "agentrl", "eval", str(config), "--data", str(rows), "-n", "2", *arguments]
    env = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=env)


def test_a_running_server_is_measured(tmp_path: Path, vllm_server: VLLMServer, tiny_model_dir: Path) -> None:
    done = evaluate(tmp_path, "--model", vllm_server.url, "--tokenizer", str(tiny_model_dir))
    assert done.returncode == 0, done.stderr
    assert "2 tasks, 2 samples each" in done.stdout
    # A random model solves nothing; the interval still says how little two tasks prove.
    assert "avg@2" in done.stdout and "pass@2" in done.stdout
    assert "0.000 to 0.842" in done.stdout


def test_a_server_that_is_not_there_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    done = evaluate(tmp_path, "--model", "http://127.0.0.1:9", "--tokenizer", str(tiny_model_dir))
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
