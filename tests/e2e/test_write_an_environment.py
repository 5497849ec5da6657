"""Runs docs/write-an-environment.md as a reader does: its files and every one of its commands, with fewer steps.

The training must gain half of what the page promises for so many steps.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.report.metrics import read
from benchmarks.first_hour import PAGE, write_tutorial

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
STEPS = 24
HALF_OF_THE_RISE = 0.2  # the reward of the steps had risen by 0.4 after so many
SHORTER = {"train": [f"train.steps={STEPS}", "train.max_minutes=null", "eval.num_tasks=32"], "rollout": []}
SAID = {
    "env": "the gold answer scores 1 and a wrong one 0 on 64 tasks",
    "train": "report.html",
    "rollout": "Where is book",
}


def test_a_reader_pastes_two_files_and_runs_every_command(tmp_path: Path) -> None:
    write_tutorial(tmp_path)
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
            input='search(words="4417")\nIt is in the \\boxed{attic}\n',
            capture_output=True,
            text=True,
            timeout=500,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert SAID[verb] in said or "Book 4417 is in the" in said, said
    assert re.search(r"Book \d{4} is in the", said), f"the trained model looks nothing up:\n{said}"
    lines = read(tmp_path / "runs" / "library" / "metrics.jsonl")
    assert len([line for line in lines if line.kind == "step"]) == STEPS
    first, last = [line.values["eval/avg_at_n"] for line in lines if line.kind == "eval"]
    assert last - first >= HALF_OF_THE_RISE, f"avg@4 {first:.3f} -> {last:.3f}"
