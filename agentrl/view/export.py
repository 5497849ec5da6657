"""Writes chosen episodes of runs for other programs: rows of messages (JSONL, Parquet), ATIF documents, a trace.

Which episodes is asked in the language of `agentrl view --json`. Nothing is written where nothing passes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.run_folder import EpisodeLine, label
from agentrl.types import Message
from agentrl.view.atif import trajectory_of
from agentrl.view.documents import Documents
from agentrl.view.query import Query
from agentrl.view.run_reader import RunReader
from agentrl.view.tables import Row, chosen_episodes
from agentrl.view.timeline import timeline_of
from agentrl.view.trace import trace_of
from agentrl.view.trajectory_files import episode_of

Format = Literal["jsonl", "parquet", "atif", "trace"]
ROWS_AT_ONCE = 500
_OPTION = "--where"
_PLACE = itemgetter("kind", "eval_set", "step", "group_id")
_Chosen = tuple[str, Row]  # run, episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. Example: `Exported(path=Path("run.jsonl"), episodes=8, rows=9, problems=())`."""

    path: Path
    episodes: int
    rows: int  # or documents: one for each segment of an episode; of a trace, steps
    problems: tuple[str, ...]  # what could not be read


def export(readers: Sequence[RunReader], to: Format, target: Path, *, where: str = "", version: str = "") -> Exported:
    """Write the episodes that pass `where`, e.g. "reward>=1&stop_reason=completed"; without a condition on `kind`, of
    training only. `version`: of agentrl, into ATIF.

    Raises ConfigError for a condition that cannot be read, where nothing passes, and for a target that is there or
    cannot be written; MissingDependencyError for Parquet without pyarrow.
    """
    if target.exists():
        raise ConfigError(f"--out: {target} is there already: name another, or remove it")
    if to == "trace":
        return _export_trace(readers, target, where)
    if to == "parquet":
        _pyarrow()
    query = Query.parse(f"episodes?{where}", option=_OPTION)
    named = Documents(readers).readers  # two runs of one name have two
    chosen = list(islice(_asked(named, query), query.limit))
    _refuse_unknown_columns(readers, query)
    problems = tuple(problem for reader in readers for problem in reader.index.problems())
    if not chosen:
        held = sum(1 for reader in readers for _ in reader.index.episodes())
        broken = f". Not all could be read: {problems[0]}" if problems else ""
        raise ConfigError(f"{_OPTION}: none of {held} episodes passes {where or 'kind=train'!r}{broken}")
    unread: list[str] = []
    segments = _segments(named, chosen, unread)
    write = {"jsonl": _write_jsonl, "parquet": _write_parquet, "atif": _atif_writer(version)}[to]
    rows = _written(target, lambda partial: write(segments, partial))
    return Exported(path=target, episodes=len(chosen) - len(unread), rows=rows, problems=(*problems, *unread))


def _export_trace(readers: Sequence[RunReader], target: Path, where: str) -> Exported:
    if len(readers) != 1 or where:
        raise ConfigError("--to trace: a trace has all episodes of one run: give one RUN, and no --where")
    timeline = timeline_of(readers[0])
    if not timeline.lanes:
        raise ConfigError(
            f"--to trace: no episode of {readers[0].run.path} says when it was played: there is none yet, or an older "
            "agentrl made the run"
        )
    content = msgspec.json.encode(trace_of(timeline))
    _written(target, lambda partial: partial.write_bytes(content))
    problems = tuple(readers[0].index.problems())
    return Exported(path=target, episodes=len(timeline.lanes), rows=len(timeline.steps), problems=problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """One segment of a chosen episode."""

    run: str  # its name, unique in the export
    model: str  # that the run trained
    row: Row  # of the episode
    line: EpisodeLine
    number: int  # in its episode, from 0
    num_segments: int


def _asked(named: Mapping[str, RunReader], query: Query) -> Iterator[_Chosen]:
    if query.sort or query.fields:
        raise ConfigError(f"{_OPTION}: sort and fields are for agentrl view --json; give conditions, and limit=N")
    is_any_kind = any(one.column == "kind" for one in query.conditions)
    for run, reader in named.items():
        for row in chosen_episodes(reader, query):
            if is_any_kind or row["kind"] == "train":
                yield run, row


def _refuse_unknown_columns(readers: Sequence[RunReader], query: Query) -> None:
    """A column that no run has is a mistake, and not a filter that nothing passes."""
    seen = {name for reader in readers for row in chosen_episodes(reader, Query(table="episodes")) for name in row}
    query.check_columns(seen, option=_OPTION)


def _segments(named: Mapping[str, RunReader], chosen: Iterable[_Chosen], unread: list[str]) -> Iterator[_Segment]:
    """In the order of the files, so that each is read once. Episodes that cannot be read are named in `unread`."""
    models = {run: reader.row().model for run, reader in named.items()}
    for (run, (kind, eval_set, step, group_id)), members in groupby(chosen, key=lambda one: (one[0], _PLACE(one[1]))):
        lines = named[run].group(kind, step, group_id, eval_set=eval_set)
        for _, row in members:
            found = [line for line in lines if episode_of(line) == row["episode_id"]]
            if not found:
                unread.append(f"{row['episode_id']} of {label(kind, eval_set)} step {step} cannot be read")
            for number, line in enumerate(found):
                yield _Segment(run=run, model=models[run], row=row, line=line, number=number, num_segments=len(found))


def _written(target: Path, write: Callable[[Path], int]) -> int:
    """Write beside the target and move it there, so that nobody sees half of it."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        number = write(partial)
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {target}: {error.strerror or error}") from error
    finally:
        _remove(partial)
    return number


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # its folder may not be one
            path.unlink()


def message_row(segment: _Segment) -> Row:
    """A row for supervised fine-tuning: `messages` as chat endpoints and trainers take them, and what to choose by."""
    row, line = segment.row, segment.line
    return {
        "messages": [_openai(message) for message in line.messages],
        "reward": line.reward,
        "rewards": line.rewards,
        "stop_reason": str(line.stop_reason),
        "run": segment.run,
        "env": row["env"],
        "kind": row["kind"],
        "eval_set": row["eval_set"],
        "step": row["step"],
        "lag": row["lag"],
        "group_id": row["group_id"],
        "episode_id": row["episode_id"],
        "segment": segment.number,
        "task_id": line.task.id,
        "answer": line.task.answer,
    }


def _openai(message: Message) -> dict[str, Any]:
    """A message of the chat API; the arguments of a call are JSON text there."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return found | ({"tool_call_id": message.tool_call_id} if message.tool_call_id is not None else {})


def _write_jsonl(segments: Iterable[_Segment], path: Path) -> int:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        return sum(file.write(encoder.encode(message_row(segment)) + b"\n") > 0 for segment in segments)


def _write_parquet(segments: Iterable[_Segment], path: Path) -> int:
    arrow, parquet = _pyarrow()
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    function = arrow.struct([("name", text), ("arguments", text)])
    call = arrow.struct([("id", text), ("type", text), ("function", function)])
    message = arrow.struct(
        [("role", text), ("content", text), ("tool_calls", arrow.list_(call)), ("tool_call_id", text)]
    )
    kinds = {"messages": arrow.list_(message), "reward": real, "rewards": arrow.map_(text, real)}
    kinds |= dict.fromkeys(("stop_reason", "run", "env", "kind", "eval_set"), text)
    kinds |= dict.fromkeys(("step", "lag", "group_id"), whole)
    kinds |= {"episode_id": text, "segment": whole, "task_id": text, "answer": text}
    schema, number = arrow.schema(list(kinds.items())), 0
    rows = iter(segments)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := [message_row(segment) for segment in islice(rows, ROWS_AT_ONCE)]:
            for row in batch:
                row["rewards"] = list(row["rewards"].items())
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            number += len(batch)
    return number


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError.of_extra("--to parquet needs the pyarrow package", "data") from error
    return pyarrow, parquet


def _atif_writer(version: str) -> Callable[[Iterable[_Segment], Path], int]:
    def write(segments: Iterable[_Segment], folder: Path) -> int:
        folder.mkdir()
        for segment in segments:
            row = segment.row
            about = {name: row[name] for name in ("kind", "eval_set", "step", "lag", "group_id", "env")}
            document = trajectory_of(
                segment.line,
                about={"run": segment.run, **about},
                agent={"name": "agentrl", "version": version, "model_name": segment.model},
                next_file=_file_name(segment, segment.number + 1) if segment.number + 1 < segment.num_segments else "",
            )
            (folder / _file_name(segment, segment.number)).write_bytes(msgspec.json.encode(document))
        return sum(1 for _ in folder.iterdir())

    return write


def _file_name(segment: _Segment, number: int) -> str:
    """Episode ids repeat from one evaluation to the next, so the step is part of the name."""
    row = segment.row
    part = f".{number}" if segment.num_segments > 1 else ""
    return f"{segment.run}-{row['step']:06d}-{row['episode_id']}{part}.json"
