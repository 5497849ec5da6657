"""Reads rows of JSONL and Parquet files as Tasks. A broken row is an error with file and line, never skipped silently.

Independent of environments: the caller gives the function that reads an answer column.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.data.hub import DataFiles, locate
from agentrl.errors import ConfigError, DataError, MissingDependencyError
from agentrl.types import Task

log = logging.getLogger(__name__)

PROMPT_KEYS = ("problem", "prompt", "question")
ANSWER_KEYS = ("answer", "solution")
PARQUET_ROWS = 1024
"""Rows that are decoded at a time."""

ReadAnswer = Callable[[str], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of a set's columns. A dot selects a nested one: `reward_model.ground_truth`.

    Example:
        Columns(problem="question", answer="reward_model.ground_truth")
    """

    problem: str | None = None  # None: the first of PROMPT_KEYS
    answer: str | None = None  # None: `answer`, else a `solution` that ends in an answer
    id: str = "id"
    is_solution: bool = False  # `answer` names worked solutions: one that marks no answer is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    values: dict[str, Any]
    where: str  # "file:line" or "file: row n"
    default_id: str


def read_tasks(
    data: str | Path,
    *,
    split: str = "train",
    columns: Columns | None = None,
    need_answers: bool = False,
    read_answer: ReadAnswer | None = None,
) -> list[Task]:
    """All rows of a file, a folder, or a data set of the hub. Columns other than problem, answer, id: metadata.

    Args:
        data: `rows.jsonl`, `rows.parquet`, a folder in hub layout, or `hf:owner/name`, each with options after a `?`:
            see `agentrl.data.hub.locate`.
        split: which files of a folder or a hub data set; an option `split=` overrides it.
        columns: their names; options `problem=`, `answer=`, `id=` override them.
        need_answers: a row without an answer is an error; one with a blank answer is left out, and a warning names it.
        read_answer: extracts the answer from a text that may be a whole solution; None where it marks no answer. The
            metadata keeps the text as `solution`.

    A row without id gets the id FILE-NUMBER. Raises ConfigError for a file that cannot be read or is empty, DataError
    for a broken row, MissingDependencyError.

    Example:
        tasks = read_tasks("rows.jsonl?answer=solution", need_answers=True)
    """
    source = locate(data, split=split)
    columns = _named_in(source, columns or Columns())
    tasks: list[Task] = []
    blank: list[str] = []
    where_of: dict[str, str] = {}
    for row in _rows(source):
        task = _task(row, columns, need_answer=need_answers, read_answer=read_answer)
        if task.id in where_of:
            raise DataError(f"{row.where}: id {task.id!r} was used in {where_of[task.id]}; make ids unique")
        where_of[task.id] = row.where
        if need_answers and task.answer is None:
            blank.append(row.where)
        else:
            tasks.append(task)
    if not tasks:
        raise ConfigError(f"data file {source.name} holds no rows{' with an answer' if blank else ''}")
    if blank:
        log.warning("%s: %d rows have a blank answer and are left out: %s", source.name, len(blank), _listed(blank))
    return tasks


def endless(tasks: list[Task], *, seed: int) -> Iterator[Task]:
    """Epoch after epoch, each in another order. `seed` determines all of them."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(tasks, len(tasks))


def _named_in(source: DataFiles, columns: Columns) -> Columns:
    named: dict[str, Any] = {key: source.options[key] for key in ("problem", "answer", "id") if key in source.options}
    return replace(columns, **named, is_solution=columns.is_solution and "answer" not in named)


def _rows(source: DataFiles) -> Iterator[_Row]:
    for path in source.files:
        stem = path.stem if source.hub_name is None else f"{source.hub_name}-{path.stem}"
        yield from _parquet(path, stem) if path.suffix == ".parquet" else _jsonl(path, stem)


def _jsonl(path: Path, stem: str) -> Iterator[_Row]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read data file {path}: {error.strerror}") from error
    if reason := _other_format(path, lines):
        raise DataError(f"{path}:1: {reason}")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _Row(values=_object(line, where), where=where, default_id=f"{stem}-{number}")


def _other_format(path: Path, lines: Sequence[bytes]) -> str | None:
    """Why a file is not JSONL but one of the formats it is mistaken for, and how to convert it."""
    jsonl = path.with_suffix(".rows.jsonl" if path.suffix == ".jsonl" else ".jsonl")
    if path.suffix in (".csv", ".tsv"):
        read = "read_csv" if path.suffix == ".csv" else "read_table"
        return (
            f'a {path.suffix[1:].upper()} file; rows are JSONL or Parquet: python -c "import pandas; '
            f"pandas.{read}('{path}').to_json('{jsonl}', orient='records', lines=True)\""
        )
    if next((line.strip() for line in lines if line.strip()), b"").startswith(b"["):
        return f"one JSON list; rows are JSONL, one object in each line: jq -c '.[]' {path} > {jsonl}"
    return None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}; one object per line") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: found {type(row).__name__}, expected an object with 'problem' and 'answer'")
    return row


def _parquet(path: Path, stem: str) -> Iterator[_Row]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError.of_extra(f"reading {path} needs pyarrow", "data") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield _Row(values=values, where=f"{path}: row {number}", default_id=f"{stem}-{number}")
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"cannot read data file {path} after row {number}: {error}") from error


def _task(row: _Row, columns: Columns, *, need_answer: bool, read_answer: ReadAnswer | None) -> Task:
    values = dict(row.values)
    key = columns.problem or next((key for key in PROMPT_KEYS if values.get(key) is not None), None)
    if key is None:
        known = f"no 'problem' (nor {', '.join(map(repr, PROMPT_KEYS[1:]))})"
        raise DataError(f"{row.where}: {known}; keys: {sorted(values)}; name it: ?problem=KEY")
    prompt = _text(_said_by_user(_take(values, key, row.where), row.where), key, row.where)
    answer, solution = _answer(values, columns, row.where, need_answer=need_answer, read_answer=read_answer)
    task_id = values.pop(columns.id, None)
    if solution is not None:
        values.setdefault("solution", solution)
    return Task(
        id=row.default_id if task_id is None else _text(task_id, columns.id, row.where),
        prompt=prompt,
        answer=answer,
        metadata={name: _plain(value) for name, value in values.items()},
    )


def _answer(
    values: dict[str, Any], columns: Columns, where: str, *, need_answer: bool, read_answer: ReadAnswer | None
) -> tuple[str | None, str | None]:
    """(the answer, the whole text where it is more than the answer)."""
    key = columns.answer or next((k for k in ANSWER_KEYS if values.get(k) is not None), None)
    if key == "solution" and columns.answer is None and read_answer is None:
        key = None  # nothing can extract the answer from it
    if key is None:
        if need_answer:
            raise DataError(f"{where}: no 'answer'; write it as a string, or name its column: ?answer=KEY")
        return None, None
    value = _take(values, key, where)
    if value is None and need_answer:
        raise DataError(f"{where}: no {key!r}; write it as a string")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None, None
    text = _text(value, key, where)
    found = read_answer(text) if read_answer is not None else None
    if found is not None and found != text.strip():
        return found.strip() or None, text
    if found is None and (columns.is_solution or (key == "solution" and columns.answer is None)):
        raise DataError(f"{where}: {key!r} marks no answer; if it is the answer itself, write ?answer={key}")
    return text, None


def _take(values: dict[str, Any], key: str, where: str) -> Any:
    """Remove and return a column, which may be nested. Raises DataError when there is none."""
    outer, _, inner = key.partition(".")
    if key in values:
        return values.pop(key)
    if inner and isinstance(values.get(outer), Mapping):
        nested = values[outer] = dict(values[outer])
        return _take(nested, inner, where)
    raise DataError(f"{where}: no {key!r}; keys: {sorted(values)}")


def _said_by_user(value: Any, where: str) -> Any:
    """The text of a prompt that is a chat of one user message; other values as they are."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return value
    roles = [message.get("role") for message in value]
    if roles != ["user"]:
        raise DataError(f"{where}: the prompt is a chat of {roles}; only a chat of one user message can be used")
    return value[0].get("content")


def _text(value: object, key: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}; write it as a string")
    if not value.strip():
        raise DataError(f"{where}: {key!r} is empty; fill it in or delete the row")
    return value


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: dates, decimals and bytes become text, since metadata is serialized."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _listed(places: list[str]) -> str:
    shown = ", ".join(places[:10])
    return shown if len(places) <= 10 else f"{shown}, ..."
