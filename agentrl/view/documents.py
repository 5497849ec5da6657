"""The JSON documents that the page asks for: runs, RUN/summary, RUN/episodes, RUN/ledger, RUN/group/KIND/STEP/ID.

A server makes each when it is asked for; a bundle writes them to files. The page is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from agentrl.report.learning_signal import signal_in, total
from agentrl.report.metrics import MetricsLine
from agentrl.run_folder import EpisodeKind, EpisodeLine
from agentrl.view.rows import flat
from agentrl.view.run_reader import RunReader
from agentrl.view.trajectory_files import KINDS, episode_of

Columns = dict[str, list[Any]]


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
            case ["group", kind, step, group_id] if kind in KINDS and step.isdecimal() and group_id.isdecimal():
                return _json(group(reader, kind, int(step), int(group_id)))
        raise KeyError(f"there is no document {name!r}")

    def names(self) -> Iterable[str]:
        """Every document that there is now."""
        yield "runs"
        for key, reader in self.readers.items():
            yield from (f"{key}/summary", f"{key}/episodes", f"{key}/ledger")
            reader.index.refresh()
            places = ((row.kind, row.step, row.group_id) for row in reader.index.groups())
            yield from (f"{key}/group/{kind}/{step}/{group_id}" for kind, step, group_id in places)


def summary(reader: RunReader) -> dict[str, Any]:
    """Everything of a run but its episodes and groups."""
    reader.index.refresh()
    lines = reader.metrics()
    counts = Counter(str(row["state"]) for row in reader.ledger())
    reader.pieces()
    signal = total(signal_in(line.values) for line in lines)
    row, config = flat(reader.row()), reader.config()
    return {
        "row": row,
        "config": config,
        "steps": _measured(lines, "step"),
        "evals": _measured(lines, "eval"),
        "events": [{"step": line.step, "values": line.values} for line in lines if line.kind == "event"],
        "ledger": counts,
        "useful": signal.useful_share if signal.groups else None,
        "headline": headline(lines),
        "diagnosis": f"{signal.share_sentence()}. {signal.diagnosis()}" if signal.cause else "",
        "problems": reader.problems(),
    }


def episodes(reader: RunReader) -> dict[str, Any]:
    """All episodes of a run, by column."""
    reader.index.refresh()
    return _table([flat(row) for row in reader.index.episodes()])


def group(reader: RunReader, kind: str, step: int, group_id: int) -> dict[str, Any]:
    """One group with its messages and tokens. Raises KeyError where it is not kept."""
    of_kind = cast(EpisodeKind, kind)
    lines = reader.group(of_kind, step, group_id)
    if not lines:
        raise KeyError(f"group {group_id} of {kind} step {step} is not kept, or cannot be read")
    reader.index.refresh()
    rows = {row.episode_id: row for row in reader.index.episodes(kind=of_kind, step=step) if row.group_id == group_id}
    segments: dict[str, list[EpisodeLine]] = {}
    for line in lines:
        segments.setdefault(episode_of(line), []).append(line)
    ids = sorted({token_id for line in lines for token_id in line.token_ids})
    pieces = reader.pieces()
    return {
        "task": lines[0].task,
        "episodes": [
            {"row": flat(rows[name]), "segments": [_segment(line) for line in found]}
            for name, found in segments.items()
            if name in rows
        ],
        "pieces": {str(token_id): text for token_id in ids if (text := pieces.text(token_id)) is not None},
        "special": [token_id for token_id in ids if pieces.is_special(token_id)],
    }


def headline(lines: Sequence[MetricsLine]) -> str:
    """Whether the run learned, in one sentence; empty without two held-out measurements."""
    evals = [line.values for line in lines if line.kind == "eval" and "eval/avg_at_n" in line.values]
    if len(evals) < 2:
        return ""
    before, after = evals[0], evals[-1]
    start, end = before["eval/avg_at_n"], after["eval/avg_at_n"]
    if start == end:
        return f"Held-out success stayed at {end:.3f}."
    low, high = (before, after) if start < end else (after, before)
    text = f"Held-out success {'rose' if start < end else 'fell'} from {start:.3f} to {end:.3f} ({end - start:+.3f})"
    if low.get("eval/avg_at_n_high", 1.0) < high.get("eval/avg_at_n_low", 0.0):
        return f"{text}: the 95 % intervals do not overlap."
    return f"{text}. The 95 % intervals overlap, so the difference may be chance."


def _segment(line: EpisodeLine) -> dict[str, Any]:
    return {
        "id": line.id,
        "messages": line.messages,
        "turns": line.turns,
        "tokens": {
            "token_ids": line.token_ids,
            "action_mask": line.action_mask,
            "behavior_logprobs": line.behavior_logprobs,
            "policy_versions": line.policy_versions,
        },
    }


def _measured(lines: Sequence[MetricsLine], kind: str) -> dict[str, Any]:
    """By step, ascending; of a step that was measured twice, the last."""
    last = {line.step: line for line in lines if line.kind == kind}
    return _table([{"step": step, "time_s": last[step].time_s, **last[step].values} for step in sorted(last)])


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns: Columns = {name: [row.get(name) for row in rows] for name in names}
    return {"count": len(rows), "columns": columns}


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
