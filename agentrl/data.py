"""JSONL rows -> Tasks. A broken row is an error with file and line; none is left out silently. Knows no environment."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.types import Task

log = logging.getLogger(__name__)

PROMPT_KEYS = ("problem", "prompt", "question")


def read_tasks(path: str | Path, *, need_answers: bool = False) -> list[Task]:
    """All rows of a JSONL file: `{"id", "problem", "answer", ...}`; further keys become metadata.

    Without `id` the row is called STEM-LINE. With `need_answers`, a row whose answer is blank is left out (nothing
    can be graded against it) and a warning names its line. Raises ConfigError for a missing or empty file, DataError
    for a broken row.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read data file {path}: {error.strerror}") from error
    line_of: dict[str, int] = {}
    tasks: list[Task] = []
    blank: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, f"{path}:{number}", default_id=f"{path.stem}-{number}", need_answer=need_answers)
        if task.id in line_of:
            raise DataError(f"{path}:{number}: id {task.id!r} was used on line {line_of[task.id]}; make ids unique")
        line_of[task.id] = number
        if need_answers and task.answer is None:
            blank.append(number)
        else:
            tasks.append(task)
    if not tasks:
        raise ConfigError(f"data file {path} holds no rows{' with an answer' if blank else ''}")
    if blank:
        log.warning("%s: %d rows have a blank answer and are left out: lines %s", path, len(blank), _listed(blank))
    return tasks


def endless(tasks: list[Task], *, seed: int) -> Iterator[Task]:
    """Epoch after epoch, each in its own order, all fixed by `seed`."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(tasks, len(tasks))


def _task(line: bytes, where: str, *, default_id: str, need_answer: bool) -> Task:
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}; one object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: found {type(row).__name__}, wanted an object with 'problem' and 'answer'")
    key = next((key for key in PROMPT_KEYS if key in row), None)
    if key is None:
        raise DataError(f"{where}: no 'problem' (nor {', '.join(map(repr, PROMPT_KEYS[1:]))}); keys: {sorted(row)}")
    answer = row.pop("answer", None)
    if answer is None and need_answer:
        raise DataError(f"{where}: no 'answer'; write it as a string")
    is_blank = answer is None or (isinstance(answer, str) and not answer.strip())
    return Task(
        id=_text(row.pop("id", default_id), "id", where),
        prompt=_text(row.pop(key), key, where),
        answer=None if is_blank else _text(answer, "answer", where),
        metadata=row,
    )


def _text(value: object, key: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}; write it as a string")
    if not value.strip():
        raise DataError(f"{where}: {key!r} is empty; fill it in or delete the row")
    return value


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown}, ..."
