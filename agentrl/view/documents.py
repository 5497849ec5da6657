"""The JSON documents that the page asks for: runs, RUN/summary, RUN/episodes, RUN/ledger, RUN/timeline,
RUN/group/KIND/STEP/ID; of a server also RUN/trace.

A server makes each when it is asked for; a bundle writes them to files. The page is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import msgspec

from agentrl.report import findings
from agentrl.report.charts import charts_of
from agentrl.report.learner_notes import Annotation
from agentrl.report.metrics import MetricsLine, held_out_lines
from agentrl.run_folder import EpisodeKind, EpisodeLine, label
from agentrl.view.rows import flat
from agentrl.view.run_reader import RunReader
from agentrl.view.timeline import Lane, timeline_of
from agentrl.view.trace import trace_of
from agentrl.view.trajectory_files import KINDS, episode_of

Columns = dict[str, list[Any]]
MAX_LANES = 5_000
"""Of a timeline on the page, the newest: 2 MB, 1.1 MB packed, where episodes have twenty turns."""


class Documents:
    """The documents of some runs. Each run has a key: the name of its folder, numbered where two have the same.

    Example:
        documents = Documents([RunReader(RunFolder.open("runs/quickstart"))])
        documents.make("quickstart/summary")
    """

    def __init__(self, readers: Iterable[RunReader]) -> None:
        self.readers: dict[str, RunReader] = {}
        for reader in readers:
            key, number = reader.name, 1
            while key in self.readers:
                number += 1
                key = f"{reader.name}~{number}"
            self.readers[key] = reader

    def make(self, name: str) -> bytes:
        """One document as JSON. Raises KeyError, with a sentence, for one that there is not."""
        if name == "runs":
            return _json({"runs": [{"key": key, **flat(reader.row())} for key, reader in self.readers.items()]})
        key, _, rest = name.partition("/")
        reader = self.readers.get(key)
        if reader is None:
            raise KeyError(f"there is no run {key!r} here")
        match rest.split("/"):
            case ["summary"]:
                return _json(summary(reader))
            case ["episodes"]:
                return _json(episodes(reader))
            case ["ledger"]:
                return _json(_table(reader.ledger()))
            case ["timeline"]:
                return _json(timeline(reader))
            case ["trace"]:
                return _json(trace_of(timeline_of(reader)))
            case ["group", kind, step, group_id] if step.isdecimal() and group_id.isdecimal():
                return _json(group(reader, kind, int(step), int(group_id)))
        raise KeyError(f"there is no document {name!r}")

    def names(self) -> Iterable[str]:
        """Every document that there is now."""
        yield "runs"
        for key, reader in self.readers.items():
            yield from (f"{key}/{name}" for name in ("summary", "episodes", "ledger", "timeline"))
            reader.index.refresh()
            for row in reader.index.groups():
                yield f"{key}/group/{label(row.kind, row.eval_set)}/{row.step}/{row.group_id}"


def summary(reader: RunReader) -> dict[str, Any]:
    """Everything of a run but its episodes and groups."""
    reader.index.refresh()
    lines = reader.metrics()
    counts = Counter(str(row["state"]) for row in reader.ledger())
    reader.pieces()
    signal = findings.signal_of_run(lines)
    row, config, sets = flat(reader.row()), reader.config(), reader.eval_sets()
    measured = {name for line in lines if line.kind == "step" for name in line.values}
    return {
        "row": row,
        "config": config,
        "steps": _measured(line for line in lines if line.kind == "step"),
        "held_out": [{"name": name, **_measured(found)} for name, found in held_out_lines(lines, sets).items()],
        "charts": charts_of(measured),
        "events": [{"step": line.step, "values": line.values} for line in lines if line.kind == "event"],
        "ledger": counts,
        "useful": signal.useful_share if signal.groups else None,
        "headline": findings.headline(lines, sets),
        "diagnosis": findings.diagnosis(lines),
        "waits": findings.waits(lines),
        "problems": reader.problems(),
    }


def episodes(reader: RunReader) -> dict[str, Any]:
    """All episodes of a run, by column."""
    reader.index.refresh()
    return {**_table([flat(row) for row in reader.index.episodes()]), "sampled": reader.index.is_sample}


def timeline(reader: RunReader) -> dict[str, Any]:
    """When everything happened; the newest episodes by column."""
    found = timeline_of(reader)
    lanes = found.lanes[-MAX_LANES:]
    columns = {one.name: [getattr(lane, one.name) for lane in lanes] for one in fields(Lane)}
    about = {one.name: getattr(found, one.name) for one in fields(found) if one.name != "lanes"}
    return {**about, "num_older": len(found.lanes) - len(lanes), "lanes": {"count": len(lanes), "columns": columns}}


def group(reader: RunReader, kind: str, step: int, group_id: int) -> dict[str, Any]:
    """One group with its messages and tokens. `kind`: train, eval or eval-SET. Raises KeyError where it is not kept."""
    name, _, eval_set = kind.partition("-")
    of_kind = cast(EpisodeKind, name)
    lines = reader.group(of_kind, step, group_id, eval_set=eval_set) if name in KINDS else []
    if not lines:
        raise KeyError(f"group {group_id} of {kind} step {step} is not kept, or cannot be read")
    reader.index.refresh()
    found_rows = reader.index.episodes(kind=of_kind, step=step, eval_set=eval_set)
    rows = {row.episode_id: row for row in found_rows if row.group_id == group_id}
    segments: dict[str, list[EpisodeLine]] = {}
    for line in lines:
        segments.setdefault(episode_of(line), []).append(line)
    ids = sorted({token_id for line in lines for token_id in line.token_ids})
    pieces = reader.pieces()
    notes = reader.annotations(step) if name == "train" else {}
    return {
        "task": lines[0].task,
        "episodes": [
            {"row": flat(rows[name]), "segments": [_segment(line, notes.get(line.id)) for line in found]}
            for name, found in segments.items()
            if name in rows
        ],
        "pieces": {str(token_id): text for token_id in ids if (text := pieces.text(token_id)) is not None},
        "special": [token_id for token_id in ids if pieces.is_special(token_id)],
    }


def _segment(line: EpisodeLine, note: Annotation | None) -> dict[str, Any]:
    return {
        "id": line.id,
        "messages": line.messages,
        "turns": line.turns,
        "learner": note,
        "tokens": {
            "token_ids": line.token_ids,
            "action_mask": line.action_mask,
            "behavior_logprobs": line.behavior_logprobs,
            "policy_versions": line.policy_versions,
        },
    }


def _measured(lines: Iterable[MetricsLine]) -> dict[str, Any]:
    """By step, ascending; of a step that was measured twice, the last."""
    last = {line.step: line for line in lines}
    return _table([{"step": step, "time_s": last[step].time_s, **last[step].values} for step in sorted(last)])


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns: Columns = {name: [row.get(name) for row in rows] for name in names}
    return {"count": len(rows), "columns": columns}


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
