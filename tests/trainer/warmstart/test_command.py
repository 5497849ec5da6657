"""`agentrl warmstart`, which executes `python -m trainer.warmstart`: what it makes, prints and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = ("model.warmstart.demonstrations=8", "model.warmstart.steps=2", "model.warmstart.batch_size=4")


def warmstart(*arguments: object, cwd: Path, module: str = "agentrl") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *(["agentrl", "warmstart"] if module == "agentrl" else [module])]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=100, cwd=cwd, env=env
    )


@pytest.mark.parametrize("module", ["agentrl", "trainer.warmstart"])
def test_help_lists_the_options(tmp_path: Path, module: str) -> None:
    done = warmstart("--help", cwd=tmp_path, module=module)
    assert done.returncode == 0
    for option in ("--out", "--sandbox-url", "--if-missing", "--progress-json"):
        assert option in done.stdout


def test_it_makes_a_model_counts_what_is_done_and_does_not_overwrite(tmp_path: Path) -> None:
    arguments = (QUICKSTART, *SMALL, "sandbox.backend=unsafe", "sandbox.allow_unsafe=true", "--out", tmp_path / "m")
    done = warmstart(*arguments, "--progress-json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert counts[-1] == [16, 16] and counts == sorted(counts)
    assert (tmp_path / "m" / "config.json").is_file()
    again = warmstart(*arguments, cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert warmstart(*arguments, "--if-missing", cwd=tmp_path).returncode == 0


def test_files_of_the_working_directory_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('imported from the working directory')")
    command = [sys.executable, "-P", "-m", "agentrl", "warmstart", "--help"]  # as the console script: -P
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0 and "--if-missing" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["nowhere.yaml"], "cannot read config nowhere.yaml"),
        ([QUICKSTART, "model.warmstart=null"], "the config has no such section"),
        ([QUICKSTART, "--bogus"], "there is no option"),
    ],
)
def test_what_is_wrong_is_named_on_one_screen(tmp_path: Path, arguments: list[object], saying: str) -> None:
    done = warmstart(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert saying in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 25


def test_without_a_warm_start_there_may_be_nothing_to_do(tmp_path: Path) -> None:
    done = warmstart(QUICKSTART, "model.warmstart=null", "--if-missing", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
