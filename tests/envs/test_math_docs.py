"""docs/math.md says how answers are graded, which sets there are, and which settings: all of it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.check import wrong_answer
from agentrl.config import EnvConfig, RolloutConfig
from agentrl.data.hub import OPTIONS
from agentrl.env import load_env_class
from envs.datasets import NAMED_SETS
from envs.grading import is_correct

PAGE = (Path(__file__).parents[2] / "docs" / "math.md").read_text()
GRADED = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (yes|no) \|.*\|$", PAGE.partition("graded by")[2], re.MULTILINE)


@pytest.mark.parametrize(("gold", "answer", "right"), GRADED)
async def test_answers_are_graded_as_the_table_says(gold: str, answer: str, right: str) -> None:
    assert await is_correct(f"So \\boxed{{{answer}}}.", gold) is (right == "yes")


def test_the_table_is_read() -> None:
    assert len(GRADED) > 20
    assert wrong_answer("25") not in {answer for _, answer, right in GRADED if right == "yes"}


def test_named_environments_exist_and_pair_up() -> None:
    pairs = re.findall(r"^\| `(\w+-v0)` \| `(\w+-v0)` \|", PAGE, re.MULTILINE)
    assert len(pairs) == 4
    assert all(issubclass(load_env_class(arm), load_env_class(control)) for arm, control in pairs)


def test_named_sets_are_the_ones_in_the_table() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `([\w.-]+/[\w.-]+)`[^|]*\| (yes)? ?\| (yes)? ?\|", PAGE, re.MULTILINE)
    told = {
        name: (repo, {s for s, said in zip(("train", "test"), splits, strict=True) if said})
        for name, repo, *splits in rows
    }
    assert told == {name: (known.repo, set(known.files)) for name, known in NAMED_SETS.items()}


def test_settings_and_options_exist() -> None:
    assert "canary_every" in RolloutConfig.model_fields and "allow_overlap" in EnvConfig.model_fields
    assert f"`rollout.canary_every` steps ({RolloutConfig().canary_every})" in PAGE
    assert all(f"`{option}=`" in PAGE for option in OPTIONS)
