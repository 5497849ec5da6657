"""Writes and reads metrics: metrics.jsonl for people and the report, and the run's sinks for dashboards.

Also computes the `rollout/*` metrics of a step's episodes. Independent of what measures the others; imports no torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from agentrl.errors import DiskError
from agentrl.report.sinks.isolated import opened
from agentrl.report.statistics import is_correct, num_response_tokens, num_turns
from agentrl.run_folder import RunFolder, write_atomically
from agentrl.types import StopReason, TrajectoryGroup

log = logging.getLogger(__name__)

MetricKind = Literal["step", "eval", "event"]
_OF_SET = re.compile(r"eval/(?:(?P<set>[^/]+)/)?avg_at_n")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """The metrics of one moment.

    Example:
        MetricsLine(kind="step", step=3, time_s=1.7e9, values={"learner/entropy": 1.2})
    """

    kind: MetricKind
    step: int  # policy version
    time_s: float  # Unix time
    values: dict[str, float] = field(default_factory=dict)


class MetricsLog:
    """Appends to a run's metrics, and passes them to `sinks`. Each line is flushed before `log` returns.

    Raises DiskError when the disk fails. What fails in a sink is warned about.

    Example:
        with MetricsLog(run_folder) as metrics:
            metrics.log("step", 1, {"learner/entropy": 1.2})
    """

    def __init__(self, run_folder: RunFolder, *, sinks: Sequence[str] = ("tensorboard",)) -> None:
        self._path = run_folder.metrics
        self._writing = run_folder.writing
        with self._writing(self._path):
            _end_torn_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        self._sinks = [opened(name, run_folder) for name in sinks]

    def log(self, kind: MetricKind, step: int, values: Mapping[str, float]) -> None:
        """Record `values` for `step`. Raises ValueError, writing nothing, when one is NaN or infinite."""
        checked = {name: _finite(name, value) for name, value in values.items()}
        time_s = time.time()
        line = {"kind": kind, "step": step, "time_s": round(time_s, 3), "values": checked}
        with self._writing(self._path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        for sink in self._sinks:
            sink.write(step, time_s, checked)

    def rewind(self, step: int) -> None:
        """Delete the steps after `step`, which will be repeated. Evaluations and events stay."""
        lines = read(self._path)
        kept = [line for line in lines if line.kind != "step" or line.step <= step]
        if kept == lines:
            return
        with self._writing(self._path):
            self._file.close()
            write_atomically(self._path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
            self._file = self._path.open("a", encoding="utf-8")
        for sink in self._sinks:
            sink.rewind(step)

    def close_sinks(self) -> None:
        """Close all sinks at the same time. Waits for those that take long, up to their deadlines."""
        sinks, self._sinks = self._sinks, []
        with ThreadPoolExecutor(max(1, len(sinks))) as pool:
            for sink in sinks:
                pool.submit(sink.close)

    def close(self) -> None:
        """Close the sinks and the file. Raises DiskError."""
        self.close_sinks()
        with self._writing(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except DiskError as full:
            if error is None:
                raise
            log.warning("%s", full)  # the error that ended the block says more


def read(path: Path) -> list[MetricsLine]:
    """All lines of a metrics.jsonl, in order; none when the file is missing.

    A line that a crash cut off is left out with a warning, since the rest of the run is still readable.
    """
    if not path.exists():
        return []
    lines: list[MetricsLine] = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            lines.append(MetricsLine(**json.loads(text)))
        except (ValueError, TypeError):
            log.warning("%s:%d is not a complete line of metrics; left out", path, number)
    return lines


def held_out_lines(lines: Sequence[MetricsLine], order: Sequence[str] = ()) -> dict[str, list[MetricsLine]]:
    """The evaluations of each held-out set, by version; the values have the names of a set without a name, `eval/*`.

    Of two measurements of one version, which a crash can leave, only the later one is kept. `order`: names that come
    first.
    """
    found: dict[str, dict[int, MetricsLine]] = {}
    for line in lines:
        name = next((of["set"] or "" for key in line.values if (of := _OF_SET.fullmatch(key))), None)
        if line.kind == "eval" and name is not None:
            values = {key.replace(f"eval/{name}/", "eval/", 1) if name else key: v for key, v in line.values.items()}
            found.setdefault(name, {})[line.step] = replace(line, values=values)
    names = [*(name for name in order if name in found), *(name for name in found if name not in order)]
    return {name: [found[name][step] for step in sorted(found[name])] for name in names}


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The `rollout/*` metrics of the episodes of one step. Empty without episodes.

    Shares are of episodes, `solve_none` and `solve_all` of groups. `tool_success_rate` is absent when no tool was
    called. A named reward is averaged over all episodes; one that does not have it counts as 0.
    """
    segments = [episode.segments for group in groups for episode in group.episodes]
    if not segments:
        return {}
    episodes = [first for first, *_ in segments]
    solved_G = [[is_correct(episode.segments[0]) for episode in group.episodes] for group in groups]
    num_tokens = [num_response_tokens(episode) for episode in segments]
    tool_calls = [episode.info.get("tool_calls", 0.0) for episode in episodes]
    values = {
        "rollout/reward_mean": _mean([episode.reward for episode in episodes]),
        "rollout/turns_mean": _mean([num_turns(episode) for episode in segments]),
        "rollout/response_tokens_mean": _mean(num_tokens),
        "rollout/response_tokens_max": max(num_tokens),
        "rollout/tool_calls_mean": _mean(tool_calls),
        "rollout/segments_mean": _mean([len(episode) for episode in segments]),
        "rollout/masked": _mean([first.weight == 0 for first in episodes]),
        "rollout/retries_mean": _mean([episode.info.get("retries", 0.0) for episode in episodes]),
        "rollout/solve_none": _mean([not any(solved) for solved in solved_G]),
        "rollout/solve_all": _mean([all(solved) for solved in solved_G]),
    }
    for reason in StopReason:
        values[f"rollout/stop_{reason}"] = _mean([episode.stop_reason == reason for episode in episodes])
    names = sorted({name for episode in episodes for name in episode.rewards})
    values |= {f"rollout/reward_{name}": _mean([one.rewards.get(name, 0.0) for one in episodes]) for name in names}
    seconds = [{k: v for k, v in episode.info.items() if k.endswith("_s")} for episode in episodes]
    values |= _means_by_name("rollout/{}_mean", seconds)
    if sum(tool_calls):
        errors = sum(episode.info.get("tool_errors", 0.0) for episode in episodes)
        values["rollout/tool_success_rate"] = 1.0 - errors / sum(tool_calls)
    return values


def _means_by_name(pattern: str, records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the records that have it."""
    names = sorted({name for record in records for name in record})
    return {pattern.format(name): _mean([record[name] for record in records if name in record]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _finite(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"metric {name} is {number}: a broken number is an error, not a point on a curve")
    return number


def _end_torn_line(path: Path) -> None:
    """End a line that a crash cut off, so that the next line is separate."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
