"""Bad input gives one screen with how to fix it and a non-zero exit code, before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def agentrl(*arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentrl", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "200", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=env)


def refused(*arguments: object, cwd: Path, saying: str, **env: str) -> None:
    done = agentrl(*arguments, cwd=cwd, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert saying in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 25
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize(
    ("override", "saying"),
    [
        ("learner.lrr=1", "did you mean learner.lr?"),
        ("lerner.lr=1", "did you mean learner?"),
        ("train.steps=0", "train.steps"),
        ("learner.lr=fast", "learner.lr"),
        ("learner.lr", "section.key=value"),
        ("algorithm.baseline=oopb", "algorithm.baseline"),
        ("rollout.temperature=0.7", "biases the importance ratios"),
        ("env.target=envs.modmath:ModMaths", "did you mean 'ModMath'?"),
        ("env.target=envs.nowhere:ModMath", "no module"),
        ("env.eval_data=/nowhere.jsonl env.target=envs.aime:AimePython", "/nowhere.jsonl"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path: Path, override: str, saying: str) -> None:
    refused("train", QUICKSTART, *override.split(" "), cwd=tmp_path, saying=saying)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    refused("train", "nowhere.yaml", cwd=tmp_path, saying="cannot read config nowhere.yaml")


def test_a_missing_model_says_how_to_get_one(tmp_path: Path) -> None:
    # Offline: without a network the hub's client would try again for 20 s.
    refused("train", QUICKSTART, "model.warmstart=null", cwd=tmp_path, saying="model.warmstart", HF_HUB_OFFLINE="1")


def test_a_port_in_use_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = agentrl("train", QUICKSTART, f"sandbox.port={port}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"sandbox.port: cannot listen on 127.0.0.1:{port}" in done.stderr


def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "problem": "1+1?", "answer": "2"}\n{"id": "b", "problem": \n')
    refused("env", "check", "envs.aime:AimePython", "--data", rows, cwd=tmp_path, saying="rows.jsonl:2")


def test_an_eval_of_a_missing_folder_is_refused(tmp_path: Path) -> None:
    refused("eval", QUICKSTART, "--model", "./nowhere", cwd=tmp_path, saying="nowhere")


def test_every_shipped_config_is_valid() -> None:
    from agentrl.config import Config

    for path in (ROOT / "configs").glob("*.yaml"):
        Config.model_validate(yaml.safe_load(path.read_text()))
