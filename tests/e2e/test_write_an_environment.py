"""Runs docs/write-an-environment.md as a reader does: its files and every one of its commands, with shorter runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.report.metrics import read

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SHORTER = {
    "train": [
        *("model.warmstart.steps=20", "model.warmstart.demonstrations=64", "train.steps=1"),
        *("rollout.groups_per_step=4", "eval.num_tasks=4", "eval.samples_per_task=1"),
    ],
    "rollout": [],
}
SAID = {"env": "gold 1.0 and wrong 0.0 on 48 rows", "train": "report.html", "rollout": "Where does"}


def test_a_reader_pastes_two_files_and_runs_every_command(tmp_path: Path) -> None:
    for language, name in (("python", "library.py"), ("yaml", "library.yaml")):
        (code,) = (code for found, code in BLOCKS if found == language)
        (tmp_path / name).write_text(code)
    commands = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
    assert [shlex.split(command)[:3] for command in commands] == [
        ["agentrl", "env", "check"],
        ["agentrl", "env", "play"],
        ["agentrl", "train", "library.yaml"],
        ["agentrl", "rollout", "library.yaml"],
    ]
    for command in commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "agentrl"
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", verb, *arguments, *SHORTER.get(verb, [])],
            cwd=tmp_path,
            input='search(words="Mia drum")\nIt is in the \\boxed{attic}\n',
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert SAID[verb] in said or "Mia keeps the drum in the" in said, said
    steps = [line for line in read(tmp_path / "runs" / "library" / "metrics.jsonl") if line.kind == "step"]
    assert len(steps) == 1
