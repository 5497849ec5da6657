"""Mathematics sets that configs name: their location, and the columns of problem and answer.

Revisions are pinned where the set may change; rows and gold answers are then the same for everyone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.data.rows import Columns, read_tasks
from agentrl.env import Split
from agentrl.errors import ConfigError
from agentrl.types import Task
from envs.grading import final_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """A data set on the hub."""

    repo: str
    files: Mapping[Split, str]  # pattern by split
    columns: Columns
    revision: str | None = None


_BARE_BOX = re.compile(r"\\boxed\s+([^\s${}]+?)[.,]?(?=[\s$]|$)")
PLAIN = Columns(problem="problem", answer="answer")
NAMED_SETS: Mapping[str, NamedSet] = {
    "DAPO-17k": NamedSet(
        repo="open-r1/DAPO-Math-17k-Processed",  # the original repeats each row a hundred times
        files={"train": "all/train-*.parquet"},
        columns=Columns(problem="prompt", answer="solution"),
    ),
    "MATH": NamedSet(
        repo="DigitalLearningGmbH/MATH-lighteval",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
        files={"train": "data/train-*.parquet", "test": "data/test-*.parquet"},
        columns=Columns(problem="problem", answer="solution", is_solution=True),
    ),
    "MATH-500": NamedSet(
        repo="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        files={"test": "test.jsonl"},
        columns=Columns(problem="problem", answer="answer", id="unique_id"),
    ),
    "AIME-2024": NamedSet(
        repo="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        files={"test": "data/train-*.parquet"},
        columns=PLAIN,
    ),
    "AIME-2025": NamedSet(
        repo="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        files={"test": "test.jsonl"},
        columns=PLAIN,
    ),
    "GSM8K": NamedSet(
        repo="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        files={"train": "main/train-*.parquet", "test": "main/test-*.parquet"},
        columns=Columns(problem="question", answer="answer", is_solution=True),
    ),
}


def read_rows(data: str, split: Split) -> list[Task]:
    """Rows with gold answers: of a named set, or what `agentrl.data.rows.read_tasks` reads. Raises ConfigError."""
    name = next((known for known in NAMED_SETS if known.casefold() == data.casefold()), None)
    if name is None or Path(data).exists():
        return _read(data, split, None)
    known = NAMED_SETS[name]
    if split not in known.files:
        raise ConfigError(f"{name} has no rows for {split!r}, only for {', '.join(map(repr, known.files))}")
    revision = f"&revision={known.revision}" if known.revision else ""
    return _read(f"hf:{known.repo}?files={known.files[split]}{revision}", split, known.columns)


def marked_answer(text: str) -> str | None:
    """The answer that a worked solution marks: after the last `####`, or in the last `\\boxed{}`; None for neither.

    MATH has a few boxes without braces, as in `$\\boxed 5$`.
    """
    if "####" in text:
        return text.rpartition("####")[2].strip()
    bare = _BARE_BOX.findall(text)
    return final_answer(text) or (bare[-1] if bare else None)


def _read(data: str, split: Split, columns: Columns | None) -> list[Task]:
    try:
        return read_tasks(data, split=split, columns=columns, need_answers=True, read_answer=marked_answer)
    except ConfigError as error:
        if "/" in data or "." in data:
            raise
        raise ConfigError(f"{error}; sets known by name: {', '.join(NAMED_SETS)}") from error
