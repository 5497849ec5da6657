"""Sets by name, read from a cache of the hub that the test lays out as the hub's client does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from agentrl.errors import ConfigError, DataError
from envs.datasets import NAMED_SETS, marked_answer, read_rows

ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {  # set -> (split, file, row)
    "DAPO-17k": ("train", "all/train-00000-of-00001.parquet", {"prompt": "6*7?", "solution": "42", "ability": "MATH"}),
    "MATH": ("test", "data/test-00000-of-00001.parquet", {"problem": "6*7?", "solution": "It is $\\boxed{42}$."}),
    "MATH-500": ("test", "test.jsonl", {"problem": "6*7?", "solution": "?", "answer": "42", "unique_id": "a/1.json"}),
    "AIME-2024": ("test", "data/train-00000-of-00001.parquet", {"id": 60, "problem": "6*7?", "answer": "042"}),
    "AIME-2025": ("test", "test.jsonl", {"id": "0", "problem": "6*7?", "answer": 42}),
    "GSM8K": ("train", "main/train-00000-of-00001.parquet", {"question": "6*7?", "answer": "<<6*7=42>>42\n#### 42"}),
}


def cache(home: Path, name: str, row: dict[str, Any]) -> None:
    """One file of a set, as if it had been downloaded."""
    known, (_, file, _) = NAMED_SETS[name], ROWS[name]
    commit = known.revision or "0" * 40
    folder = home / "hub" / f"datasets--{known.repo.replace('/', '--')}"
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True)
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        parquet.write_table(arrow.Table.from_pylist([row]), path)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)


def test_every_set_is_read_with_its_own_columns(tmp_path: Path) -> None:
    for name, (_, _, row) in ROWS.items():
        cache(tmp_path, name, row)
    code = (
        "import sys, json; from envs.datasets import read_rows\n"
        "for name, split in json.loads(sys.argv[1]):\n"
        "    (task,) = read_rows(name, split); print(name, task.prompt, int(task.answer))"
    )
    wanted = json.dumps([(name.lower(), split) for name, (split, _, _) in ROWS.items()])
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code, wanted], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [f"{name.lower()} 6*7? 42" for name in ROWS], done.stderr


def test_every_named_set_is_tested() -> None:
    assert set(ROWS) == set(NAMED_SETS)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 1 and\n#### 1,005", "1,005"),
        ("So $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("So \\boxed{1}, no: \\boxed{2}.", "2"),
        ("So $\\boxed 5$.", "5"),
        ("So $x=\\boxed 42.$", "42"),
        ("It is five.", None),
        ("\\boxed{", None),
    ],
)
def test_the_marked_answer_of_a_solution(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_a_solution_of_math_without_a_box_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "x", "solution": "So \\\\boxed{1}"}\n{"problem": "y", "solution": "It is five."}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 'solution' marks no answer"):
        read_rows(str(path), "train")


def test_a_split_that_a_set_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match="AIME-2024 has no rows for 'train', only for 'test'"):
        read_rows("AIME-2024", "train")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"cannot read data file GMS8K: .*; sets known by name: DAPO-17k, MATH"):
        read_rows("GMS8K", "train")
