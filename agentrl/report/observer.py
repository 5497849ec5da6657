"""What a run, a measurement or a check tells whoever watches it: its phases, each step, each held-out measurement.

Independent of terminals and files: the console shows it, `agentrl doctor --deep` judges it, a script may plot it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from agentrl.engine.base import WeightUpdate
from agentrl.report.learning_signal import LearningSignal
from agentrl.report.statistics import EvalResult
from agentrl.types import StepOutput

Advance = Callable[[int, int], None]
Outcome = Literal["done", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step that was made and whose weights are in the engines.

    Example:
        StepReport(step=1, output=output, update=session.last_update, metrics={"rollout/reward_mean": 0.5})
    """

    step: int
    output: StepOutput  # of the learner
    update: WeightUpdate | None  # by which the engines took the new weights; None where none was measured
    metrics: Mapping[str, float]  # to be shown and stored; what decides something has a field of its own
    signal: LearningSignal = field(default_factory=LearningSignal)  # of the groups that finished last
    made_before: bool = False  # made again after a resume, from the same episodes; not stored a second time


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run.

    Example:
        summary = await orchestrator.run()
        improvement = summary.after.avg - summary.before.avg
    """

    num_steps: int
    before: EvalResult  # of the first held-out set
    after: EvalResult
    train_s: float
    overlap: float  # share of the learner's working time during which the engine generated, since its last start
    note: str = ""  # why it ended early; empty if it did not
    signal: LearningSignal = field(default_factory=LearningSignal)  # of all finished groups
    num_refused: int = 0  # steps that the learner refused: they changed no weight
    others: tuple[tuple[EvalResult, EvalResult], ...] = ()  # before and after, of the other sets


class Observer:
    """Is told what happens. Each method does nothing here: override the ones that you need.

    The methods are called by the thread that runs the work, which waits for them: return quickly. An exception ends the
    work, as any other error does: every part is stopped, and the caller gets the exception.

    Example:
        class Rewards(Observer):
            def step(self, report: StepReport) -> None:
                print(report.step, report.metrics["rollout/reward_mean"])
    """

    def run_folder(self, path: Path) -> None:
        """The run has this folder, new or resumed; nothing is started yet."""

    def resumed(self, version: int, made_before: int) -> None:
        """A run, or its learner, was started again: it continues from `version`. The steps after it up to `made_before`
        are made again, from the journal."""

    def phase_started(self, name: str) -> None:
        """A phase such as "starting the engine (vLLM)" began."""

    def phase_progress(self, name: str, done: int, total: int) -> None:
        """`done` of `total` units of the phase are done."""

    def phase_ended(self, name: str, seconds: float, outcome: Outcome) -> None:
        """The phase is over. "failed": by an error; "stopped": by Ctrl-C or because another part failed."""

    def step(self, report: StepReport) -> None:
        """A step was made and its weights are in the engines."""

    def evaluating(self, done: int, total: int) -> None:
        """A held-out measurement of a run is under way: `done` of `total` tasks, of all sets together."""

    def evaluated(self, result: EvalResult) -> None:
        """A held-out measurement of one set is finished."""

    def summary(self, summary: Summary, run_path: Path, report: Path) -> None:
        """The run is over, and its report is written."""

    @contextmanager
    def phase(self, name: str) -> Iterator[Advance]:
        """Tell of a phase that lasts as long as the block; call what is yielded with (done, total)."""
        began = time.monotonic()
        outcome: Outcome = "stopped"  # by a cancellation or Ctrl-C, unless it ends otherwise
        self.phase_started(name)
        try:
            yield lambda done, total: self.phase_progress(name, done, total)
            outcome = "done"
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.phase_ended(name, time.monotonic() - began, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """The work is over or has failed: only `summary` may follow."""


class Observers(Observer):
    """Tells several observers, in order; None stands for nobody.

    Example:
        with Observers(TrainConsole(total_steps=100), Rewards()) as observer: ...
    """

    def __init__(self, *members: Observer | None) -> None:
        self._members = [member for member in members if member is not None]
        self._entered = ExitStack()

    def run_folder(self, path: Path) -> None:
        """See Observer."""
        for member in self._members:
            member.run_folder(path)

    def resumed(self, version: int, made_before: int) -> None:
        """See Observer."""
        for member in self._members:
            member.resumed(version, made_before)

    def phase_started(self, name: str) -> None:
        """See Observer."""
        for member in self._members:
            member.phase_started(name)

    def phase_progress(self, name: str, done: int, total: int) -> None:
        """See Observer."""
        for member in self._members:
            member.phase_progress(name, done, total)

    def phase_ended(self, name: str, seconds: float, outcome: Outcome) -> None:
        """See Observer."""
        for member in self._members:
            member.phase_ended(name, seconds, outcome)

    def step(self, report: StepReport) -> None:
        """See Observer."""
        for member in self._members:
            member.step(report)

    def evaluating(self, done: int, total: int) -> None:
        """See Observer."""
        for member in self._members:
            member.evaluating(done, total)

    def evaluated(self, result: EvalResult) -> None:
        """See Observer."""
        for member in self._members:
            member.evaluated(result)

    def summary(self, summary: Summary, run_path: Path, report: Path) -> None:
        """See Observer."""
        for member in self._members:
            member.summary(summary, run_path, report)

    def __enter__(self) -> Self:
        for member in self._members:
            self._entered.enter_context(member)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, tb)
