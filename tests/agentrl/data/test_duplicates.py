"""Training rows that are in a test set too are found, named, and refused at the start of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentrl.config import EnvConfig, parse
from agentrl.data.duplicates import Overlap, find_overlaps, refuse_overlap, words_of
from agentrl.errors import ConfigError
from agentrl.report.console import TrainConsole
from agentrl.training.run import Training
from agentrl.types import Task
from envs.countdown import Countdown
from envs.math_python import Math
from envs.modmath import ModMath

SQUARE = (
    "Square $ABCD$ has sides of length 2. Set $S$ is the set of all segments that have length 2 and end on its sides."
)


def found(train: str, test: str, *, answers: tuple[str | None, str | None] = (None, None)) -> list[Overlap]:
    rows = [Task(id="a", prompt=train, answer=answers[0])], [Task(id="b", prompt=test, answer=answers[1])]
    return find_overlaps(*rows)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Find $x+1$.", "find  $x + 1$"),
        ("Find $\\dfrac{1}{2}$ of $1,000$.", "Find $\\frac{1}{2}$ of $1{,}000$!"),
        ("Compute\n\\[\\left( a+b \\right)\\]", "Compute $(a + b)$"),
        ("What is ½ of 8?", "what is ½ of 8"),
    ],
)
def test_a_problem_written_otherwise_is_the_same_problem(train: str, test: str) -> None:
    assert found(train, test) == [Overlap(train_id="a", test_id="b", similarity=1.0)]


def test_a_problem_in_nearly_the_same_words_is_found() -> None:
    (overlap,) = found(SQUARE.replace("Square $ABCD$", "A square"), SQUARE, answers=("86", "086"))
    assert 0.6 <= overlap.similarity < 1


@pytest.mark.parametrize(
    ("train", "answers"),
    [
        (SQUARE.replace("2", "3"), ("86", "86")),  # one template, other numbers
        (SQUARE.replace("all segments", "no segments"), ("86", "14")),  # another question: another answer
        ("A train leaves at 2 and goes 2 miles.", (None, None)),
        ("", (None, None)),
    ],
)
def test_another_problem_is_not_found(train: str, answers: tuple[str | None, str | None]) -> None:
    assert found(train, SQUARE, answers=answers) == []


def test_words_keep_numbers_and_operators() -> None:
    assert words_of("If $x^2 - 1{,}000 = 3.5$, then?") == ["if", "x", "^", "2", "-", "1000", "=", "3.5", "then"]


def test_seventeen_thousand_rows_against_a_thousand_take_seconds() -> None:
    rng, words = Random(0), [f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(400)]
    texts = [" ".join(rng.choices(words, k=60)) + f" {rng.randint(1, 50)}" for _ in range(18_000)]
    rows = [Task(id=str(i), prompt=text) for i, text in enumerate(texts)]
    started = time.process_time()
    overlaps = find_overlaps([*rows[:17_000], *rows[17_000:17_003]], rows[17_000:])
    assert [overlap.train_id for overlap in overlaps] == ["17000", "17001", "17002"]
    assert time.process_time() - started < 20


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> EnvConfig:
    shared = {"problem": "Find $1+1$.", "answer": "2"}
    train = write(tmp_path / "train.jsonl", {"problem": "Find 3.", "answer": "3"}, shared)
    return EnvConfig(target="x:X", train_data=train, eval_data=write(tmp_path / "test.jsonl", shared))


def test_a_run_on_its_own_test_problems_is_refused_by_row(config: EnvConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_overlap(Math, config)
    assert "1 rows of env.train_data" in str(caught.value)
    assert "train-2 repeats test-1 (similarity 1.00)" in str(caught.value)
    assert "env.allow_overlap: true" in str(caught.value)


def test_it_is_allowed_where_the_user_says_so(config: EnvConfig) -> None:
    refuse_overlap(Math, config.model_copy(update={"allow_overlap": True}))


def test_generated_problems_are_compared_with_rows_of_a_file_as_far_as_they_go(tmp_path: Path) -> None:
    task = next(iter(ModMath.tasks("train", seed=0)))
    path = write(tmp_path / "test.jsonl", {"problem": task.prompt, "answer": task.answer})
    with pytest.raises(ConfigError, match=r"env.train_data \(generated\)"):
        refuse_overlap(ModMath, EnvConfig(target="x:X", eval_data=path))


def test_what_is_generated_for_both_splits_is_the_environments_own_affair() -> None:
    refuse_overlap(Countdown, EnvConfig(target="x:X"))


def test_agentrl_train_refuses_before_it_starts_anything(config: EnvConfig, tmp_path: Path) -> None:
    tree = {"name": "x", "out_dir": str(tmp_path / "runs"), "model": {"path": "none", "warmstart": {}}}
    env = {"target": "Math-v0", "train_data": config.train_data, "eval_data": config.eval_data}
    with pytest.raises(ConfigError, match="train-2 repeats test-1"):
        Training(parse(tree | {"env": env}, source="test"), TrainConsole(total_steps=1))
    assert not (tmp_path / "runs").exists()
