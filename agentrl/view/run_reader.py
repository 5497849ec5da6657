"""One run, read for a viewer: each part by itself, so that a missing or damaged one hides nothing else.

What could not be read is named in `problems`, which each way of showing a run prints. Independent of servers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from agentrl.buffer.journal import Journal
from agentrl.buffer.journal_format import StepTimes
from agentrl.errors import AgentRLError, ConfigError
from agentrl.report import learner_notes
from agentrl.report.learner_notes import Annotation
from agentrl.report.metrics import MetricKind, MetricsLine, held_out_lines
from agentrl.run_folder import EpisodeKind, EpisodeLine, RunFolder
from agentrl.supervision.status import Assessment, RunState, assess, read_status
from agentrl.view.episode_index import EpisodeIndex
from agentrl.view.pieces import Pieces
from agentrl.view.rows import RunRow
from agentrl.view.trajectory_files import TrajectoryFile, decoded

LEDGER_COLUMNS = ("group_id", "task_id", "state", "admitted", "step", "reason", "rewards")


class RunReader:
    """Reads one run folder. Each call sees what the run has written by then. `max_files`: of the episodes, a sample.

    Example:
        reader = RunReader(RunFolder.open("runs/quickstart"))
        reader.row().sentence, reader.problems()
    """

    def __init__(self, run: RunFolder, *, max_files: int | None = None) -> None:
        self.run = run
        self.index = EpisodeIndex(run, max_files=max_files)
        self._problems: dict[str, list[str]] = {}
        self._pieces: Pieces | None = None
        self._last: tuple[tuple[Path, int, int], dict[int, list[bytes]]] | None = None

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.run.path.resolve().name

    def problems(self) -> list[str]:
        """What could not be read, by the calls so far."""
        return [one for part in self._problems.values() for one in part] + self.index.problems()

    def config(self) -> dict[str, Any]:
        """The resolved config; empty where it cannot be read."""
        self._problems["config"] = []
        try:
            found = json.loads(self.run.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._problems["config"] = [f"config.json cannot be read ({error})"]
            return {}
        return found if isinstance(found, dict) else {}

    def status(self) -> Assessment | None:
        """What `agentrl status` says; None where there is no status file that can be read."""
        try:
            return assess(read_status(self.run.path), self.run.path)
        except ConfigError:
            return None

    def metrics(self, kind: MetricKind | None = None) -> list[MetricsLine]:
        """The lines of metrics.jsonl; a line that is half written, or holds no finite number, is named and left out."""
        lines, self._problems["metrics"] = _metrics(self.run.metrics)
        return [line for line in lines if kind in (None, line.kind)]

    def ledger(self) -> list[dict[str, Any]]:
        """Every group that was issued, from the journal; empty where it cannot be read."""
        self._problems["journal"] = []
        if not self.run.journal.exists():
            self._problems["journal"] = ["journal.sqlite is missing: the ledger is not shown"]
            return []
        try:
            with closing(Journal(self.run.journal, read_only=True)) as journal:
                return [dict(zip(LEDGER_COLUMNS, row, strict=True)) for row in journal.ledger()]
        except (AgentRLError, msgspec.MsgspecError) as error:
            self._problems["journal"] = [f"the ledger is not shown: {error}"]
            return []

    def step_times(self) -> dict[int, StepTimes]:
        """When each step was made, from the journal; empty where it cannot be read, or has no times."""
        try:
            with closing(Journal(self.run.journal, read_only=True)) as journal:
                return journal.step_times()
        except (AgentRLError, msgspec.MsgspecError):
            return {}  # `ledger` says why

    def annotations(self, step: int) -> Mapping[str, Annotation]:
        """What the learner made of a step's trajectories, by id; empty where it is not written."""
        self._problems["annotations"] = []
        try:
            return learner_notes.read(self.run, step)
        except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
            self._problems["annotations"] = [f"the learner's numbers of step {step} cannot be read ({error})"]
            return {}

    def group(self, kind: EpisodeKind, step: int, group_id: int, *, eval_set: str = "") -> list[EpisodeLine]:
        """The segments of a group with messages and tokens; empty where they are not kept."""
        problems: list[str] = []
        self._problems["group"] = problems
        file = TrajectoryFile.of(self.run, kind, step, eval_set)
        try:
            stamp = (file.path, *file.stamp())
            if self._last is None or self._last[0] != stamp:
                self._last = (stamp, dict(file.groups(problems)))
            return decoded(self._last[1].get(group_id, ()))
        except (OSError, msgspec.DecodeError) as error:
            problems.append(f"{file.path.name}: group {group_id} cannot be read ({error})")
            return []

    def pieces(self) -> Pieces:
        """Texts of token ids, by the tokenizer of the run's model."""
        if self._pieces is None:
            path = (self.config().get("model") or {}).get("path") or ""
            self._pieces = Pieces.of_model([Path(path), *self._exported()])
        self._problems["tokenizer"] = [self._pieces.problem] if self._pieces.problem else []
        return self._pieces

    def row(self) -> RunRow:
        """The run in one row."""
        config, status, lines = self.config(), self.status(), self.metrics()
        judged = next(iter(held_out_lines(lines, self.eval_sets()).values()), [])  # the run is judged by the first set
        evals = [line.values["eval/avg_at_n"] for line in judged]
        return RunRow(
            run=self.name,
            state=status.state if status else "unknown",
            sentence=status.sentence if status else "no status file: an older agentrl made this run, or it never began",
            steps=max((line.step for line in lines if line.kind == "step"), default=0),
            num_steps=(config.get("train") or {}).get("steps"),
            env=(config.get("env") or {}).get("target") or "",
            model=(config.get("model") or {}).get("path") or "",
            started_s=lines[0].time_s if lines else None,
            ended_s=lines[-1].time_s if lines else None,
            eval_first=evals[0] if evals else None,
            eval_last=evals[-1] if evals else None,
            problems=tuple(self.problems()),
        )

    def eval_sets(self) -> list[str]:
        """The names of the held-out sets, in the order of the config; empty where there is one, without a name."""
        return list((self.config().get("eval") or {}).get("sets") or ())

    def envs(self) -> dict[str, str]:
        """The target of the environment of each held-out set; "": of training, and of the set without a name."""
        config = self.config()
        target = (config.get("env") or {}).get("target") or ""
        sets = (config.get("eval") or {}).get("sets") or {}
        return {"": target, **{name: one.get("target") or target for name, one in sets.items()}}

    def is_live(self) -> bool:
        """Whether the run may still write."""
        status = self.status()
        return status is not None and status.state in (RunState.RUNNING, RunState.STALLED)

    def _exported(self) -> Iterator[Path]:
        yield from sorted(path.parent for path in self.run.checkpoints.glob("*/tokenizer.json"))


def _metrics(path: Path) -> tuple[list[MetricsLine], list[str]]:
    """The lines that can be read, and what is wrong with the others."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], ["metrics.jsonl is missing: no curves are shown"]
    except OSError as error:
        return [], [f"metrics.jsonl cannot be read ({error.strerror})"]
    whole, _, rest = text.rpartition("\n")
    lines: list[MetricsLine] = []
    problems: list[str] = []
    for number, one in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            line = MetricsLine(**json.loads(one))
            if not all(math.isfinite(value) for value in (line.step, line.time_s, *line.values.values())):
                raise ValueError("a number is not finite")
            lines.append(line)
        except (ValueError, TypeError, AttributeError) as error:
            problems.append(f"metrics.jsonl, line {number} cannot be read ({error}): it is left out")
    if rest:  # a run that is being written: its end comes with the next read
        problems.append("metrics.jsonl ends in half a line: it is left out")
    return lines, problems
