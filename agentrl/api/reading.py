"""`agentrl.read_run`: what a run left in its folder, as records. The run may be running, killed, or old."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from agentrl.buffer.journal import Journal
from agentrl.errors import MissingDependencyError
from agentrl.report import metrics
from agentrl.report.metrics import MetricKind
from agentrl.report.statistics import EvalResult, num_response_tokens, num_turns
from agentrl.run_folder import EpisodeKind, RunFolder
from agentrl.supervision.status import Assessment, assess, read_status
from agentrl.types import EpisodeRecord, Message, TrajectoryGroup

METRIC_COLUMNS = ("kind", "step", "time_s")
EPISODE_COLUMNS = (
    *("kind", "step", "eval_set", "group_id", "episode_id", "task_id", "prompt", "answer", "reward", "stop_reason"),
    *("num_turns", "num_tokens", "num_segments", "oldest_version", "newest_version", "messages"),
)
LEDGER_COLUMNS = ("group_id", "task_id", "state", "admitted", "step", "reason", "rewards")


class Records(Sequence[dict[str, Any]]):
    """Rows with the same columns; None where a row has no value.

    Example:
        rows = agentrl.read_run("runs/quickstart").metrics()
        rows[-1]["rollout/reward_mean"], rows.columns()["rollout/reward_mean"], rows.to_pandas()
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
        found = list(rows)
        self._names = list(dict.fromkeys([*columns, *(name for row in found for name in row)]))
        self._rows = [{name: row.get(name) for name in self._names} for row in found]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Records:
        return Records(self._rows[index], self._names) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} records of {', '.join(self._names)}>"

    def columns(self) -> dict[str, list[Any]]:
        """Name -> the values of all rows."""
        return {name: [row[name] for row in self._rows] for name in self._names}

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises MissingDependencyError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise MissingDependencyError.of_extra("a DataFrame needs the pandas package", "pandas") from error
        return pandas.DataFrame(self._rows, columns=self._names)

    def to_arrow(self) -> Any:
        """A pyarrow.Table. Raises MissingDependencyError without pyarrow."""
        try:
            import pyarrow
        except ImportError as error:
            raise MissingDependencyError.of_extra("an Arrow table needs the pyarrow package", "data") from error
        return pyarrow.table(self.columns())


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder. Each call reads what the run has written by then, so that a running one can be followed.

    Example:
        run = agentrl.read_run("runs/quickstart")
        run.status().sentence
        run.episodes(kind="eval", step=20).to_pandas().groupby("task_id").reward.mean()
    """

    folder: RunFolder

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config as it was saved. `agentrl.train(run.config)` starts the same run again."""
        config: dict[str, Any] = json.loads(self.folder.config.read_text())
        return config

    def status(self) -> Assessment:
        """Whether it is running, stalled, dead, done, failed or stopped; one sentence; what can be done.

        Raises ConfigError for a run that has not started, or that an agentrl without status files made.
        """
        return assess(read_status(self.path), self.path)

    def metrics(self, kind: MetricKind | None = "step") -> Records:
        """metrics.jsonl: a row for each step, held-out measurement ("eval") or event; None: all of them.

        Columns: kind, step (policy version), time_s (Unix time), and every metric under its name.
        """
        lines = [line for line in metrics.read(self.folder.metrics) if kind in (None, line.kind)]
        rows = ({"kind": line.kind, "step": line.step, "time_s": line.time_s, **line.values} for line in lines)
        return Records(rows, METRIC_COLUMNS)

    def evaluations(self) -> list[EvalResult]:
        """The held-out measurements of all sets, by policy version. Raises ConfigError as `ledger` does."""
        if not self.folder.journal.exists():
            return []
        with closing(Journal(self.folder.journal, read_only=True)) as journal:
            return journal.evaluations()

    def ledger(self) -> Records:
        """Every group that was issued: a row each, by group_id. Raises ConfigError for a journal of another agentrl.

        Columns: group_id; task_id; state (trained, dropped_stale, dropped_zero_variance, failed, cancelled, restarted,
        or the state in which it is now); admitted (policy version then); step (version whose batch it is in); reason
        (of a failure); rewards (of its episodes; None before they are finished).
        """
        if not self.folder.journal.exists():
            return Records([], LEDGER_COLUMNS)
        with closing(Journal(self.folder.journal, read_only=True)) as journal:
            return Records((dict(zip(LEDGER_COLUMNS, row, strict=True)) for row in journal.ledger()), LEDGER_COLUMNS)

    @property
    def eval_sets(self) -> list[str]:
        """The held-out sets whose episodes were kept; the only one of a run without `eval.sets` is named ""."""
        return self.folder.trajectory_sets()

    def steps(self, kind: EpisodeKind = "train", eval_set: str | None = None) -> list[int]:
        """The steps ("train") or policy versions ("eval") whose episodes were kept, ascending.

        `eval_set`: only those of this held-out set; None: of any.
        """
        names = self._names(kind, eval_set)
        return sorted({step for name in names for step in self.folder.trajectory_steps(kind=kind, set_name=name)})

    def groups(self, step: int, kind: EpisodeKind = "train", eval_set: str | None = None) -> list[TrajectoryGroup]:
        """The groups of one step with everything: tokens, logprobs, versions. Raises FileNotFoundError.

        `eval_set`: only those of this held-out set; None: of all.
        """
        return [group for _, of_set in self._kept(kind, step, eval_set) for group in of_set]

    def episodes(self, kind: EpisodeKind = "train", step: int | None = None, eval_set: str | None = None) -> Records:
        """A row for each episode of one step, or of all steps; of one held-out set, or of all. `groups` has the tokens.

        Columns: kind; step; eval_set ("" where it has no name); group_id; episode_id; task_id; prompt; answer; reward;
        stop_reason; num_turns; num_tokens (sampled); num_segments; oldest_version and newest_version (of the policy;
        None without a token record); messages (dicts of role, content, tool_calls with arguments as JSON); rewards/NAME
        and info/NAME for each named reward and count. Raises FileNotFoundError where the step was not kept.
        """
        steps = self.steps(kind, eval_set) if step is None else [step]
        rows = (
            {"kind": kind, "step": at, "eval_set": name, **_episode(group, episode)}
            for at in steps
            for name, groups in self._kept(kind, at, eval_set)
            for group in groups
            for episode in group.episodes
        )
        return Records(rows, EPISODE_COLUMNS)

    def _names(self, kind: EpisodeKind, eval_set: str | None) -> list[str]:
        """The held-out sets that are meant; training has one without a name."""
        return [""] if kind == "train" else self.eval_sets if eval_set is None else [eval_set]

    def _kept(self, kind: EpisodeKind, step: int, eval_set: str | None) -> list[tuple[str, list[TrajectoryGroup]]]:
        names = self._names(kind, eval_set)
        kept = [name for name in names if step in self.folder.trajectory_steps(kind=kind, set_name=name)]
        return [(name, self.folder.read_trajectories(step, kind=kind, set_name=name)) for name in kept or names or [""]]

    def checkpoints(self) -> dict[str, Path]:
        """Folders of exported models by name: step_N, and `final` for the trained one, which is last."""
        folders = [config.parent for config in self.folder.checkpoints.glob("[!.]*/config.json")]
        in_order = sorted(folders, key=lambda folder: (folder.name == "final", len(folder.name), folder.name))
        return {folder.name: folder for folder in in_order}


def read_run(path: str | Path) -> Run:
    """The run in a folder, or of this name in runs/; it may be running, killed, over or old. Raises ConfigError.

    Example:
        agentrl.read_run("runs/quickstart").metrics()[-1]["rollout/reward_mean"]
    """
    return Run(RunFolder.open(path))


def _episode(group: TrajectoryGroup, episode: EpisodeRecord) -> dict[str, Any]:
    first, segments = episode.segments[0], episode.segments
    versions = [
        span.version for one in segments for turn in one.turns for span in turn.completion.version_spans
    ]  # none for an episode that a chat endpoint played
    return {
        "group_id": group.group_id,
        "episode_id": episode.id,
        "task_id": group.task.id,
        "prompt": group.task.prompt,
        "answer": group.task.answer,
        "reward": episode.reward,
        "stop_reason": str(first.stop_reason),
        "num_turns": int(num_turns(segments)),
        "num_tokens": int(num_response_tokens(segments)),
        "num_segments": len(segments),
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "messages": [_message(message) for one in segments for message in one.messages],
        **{f"rewards/{name}": value for name, value in first.rewards.items()},
        **{f"info/{name}": value for name, value in first.info.items()},
    }


def _message(message: Message) -> dict[str, Any]:
    """The same fields for each message, so that a table can hold them."""
    calls = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls}
