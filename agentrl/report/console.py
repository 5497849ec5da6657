"""Output in the terminal: phases, progress bars, one line for each step, results, errors on one screen.

Without a terminal it writes plain lines without control codes. Independent of where the numbers come from.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from agentrl.report.learning_signal import Cause, LearningSignal
from agentrl.report.observer import Observer, Outcome, StepReport, Summary
from agentrl.report.statistics import EvalResult
from agentrl.run_folder import RunFolder

log = logging.getLogger(__name__)

PLAIN_PROGRESS_EVERY_S = 15.0

_COLUMNS = (  # title, metric, format, width; with the cause at its end, a line fits 80 columns
    ("step", "run/step", "{:.0f}", 4),
    ("reward", "rollout/reward_mean", "{:.2f}", 6),
    ("useful", "rollout/useful_groups", "{:.0%}", 6),
    ("ess", "learner/ess_ratio", "{:.2f}", 4),
    ("lr x", "learner/lr_scale", "{:.2f}", 4),
    ("|grad|", "learner/grad_norm", "{:.2f}", 6),
    ("lag", "learner/lag_mean", "{:.1f}", 3),
    ("tok/s", "engine/tokens_per_s", "{:.0f}", 6),
    ("step s", "run/step_s", "{:.1f}", 6),
    ("wait s", "wait/learner_for_batch_s", "{:.1f}", 6),
    ("idle", "engine/idle_share", "{:.0%}", 4),
)
_LEGEND = (  # 80 columns at most
    "reward: mean of the episodes that finished since the last step",
    "useful: share of finished groups whose rewards differ; only they are trained",
    "ess: share of the batch that counts after importance weighting (1: on-policy)",
    "lr x: factor of the learning rate, from ess   |grad|: norm before clipping",
    "lag: optimizer steps between sampling and training   tok/s: sampled tokens",
    "wait s: the learner waited for a batch   idle: the engine had nothing to do",
)
_MAX_CAUSES, _MAX_LINES, _MAX_CHARACTERS = 4, 12, 900  # of an error's screen


class _LossyFile:
    """A file that may become unwritable (`| head`, a closed terminal, a full disk): it then drops output."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_lost = False

    def write(self, text: str) -> int:
        """See IO.write."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """See IO.flush."""
        try:
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _lose(self, error: OSError) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        with suppress(OSError):  # buffered output would fail again when the interpreter ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
        log.warning(
            "standard output can no longer be written (%s): the work continues without it; `agentrl status` and the "
            "run's folder show its progress",
            error.strerror,
        )


class Terminal(Observer):
    """Phases and progress bars, shared by all commands.

    Example:
        with terminal.phase("starting the sandbox"): ...
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True, file=_LossyFile(sys.stdout))  # type: ignore[arg-type]
        self._shown: Status | Live | None = None  # of the phase, in a terminal
        self._phase_bar: Progress | None = None
        self._last_line = 0.0  # without a terminal: when the phase began, or its progress was last shown
        self.phase_seconds: dict[str, float] = {}

    def line(self, text: str | Text) -> None:
        """Print one line."""
        self._console.print(text, markup=False)

    def phase_started(self, name: str) -> None:
        """Show a spinner."""
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._show(self._console.status(Text(name)))

    def phase_progress(self, name: str, done: int, total: int) -> None:
        """Show a bar; without a terminal a line every few seconds, so that a log shows progress."""
        if self._console.is_terminal:
            if self._phase_bar is None:
                self._phase_bar = _bar(self._console)
                self._phase_bar.add_task(name, total=None)
                self._show(Live(self._phase_bar, console=self._console, transient=True))
            self._phase_bar.update(self._phase_bar.task_ids[0], completed=done, total=total)
        elif (now := time.monotonic()) - self._last_line >= PLAIN_PROGRESS_EVERY_S:
            self._last_line = now
            self.line(f"{name}: {done} of {total}")

    def phase_ended(self, name: str, seconds: float, outcome: Outcome) -> None:
        """Print one line with the duration, and whether it failed."""
        self._show(None)
        self._phase_bar = None
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self.line(f"{name}: {'' if outcome == 'done' else f'{outcome} after '}{seconds:.1f} s")

    def _show(self, display: Status | Live | None) -> None:
        """Show this in the place of what is shown: there can be only one at a time."""
        if self._shown is not None:
            self._shown.stop()
        self._shown = display
        if display is not None:
            display.start()


class TrainConsole(Terminal):
    """Output of `agentrl train`: a bar over the steps, and one line for each. An Observer of the run.

    Example:
        with TrainConsole(total_steps=100) as console:
            console.step(report)
    """

    def __init__(self, *, total_steps: int, console: Console | None = None) -> None:
        super().__init__(console)
        self._bar = _bar(self._console)
        self._job = self._bar.add_task("training", total=total_steps, visible=False)
        self._measuring = self._bar.add_task("measuring", total=None, visible=False)
        self._live = Live(self._bar, console=self._console, transient=True)
        self._num_lines = 0
        self._explained: Cause | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def run_folder(self, path: Path) -> None:
        """Say where the run is, and how to follow it."""
        run = RunFolder(path=path)
        if run.journal.exists():
            note = ", which continues"
        else:
            note = f"; {run.earlier} is an earlier run of this name" if run.earlier else ""
        self.line(f"run folder: {path}{note}")
        self.line(f"  follow it from another terminal: agentrl status {path} --watch")
        self.line(f"  report: {run.report} when it ends, or at any time by agentrl report {path}")

    def resumed(self, version: int, made_before: int) -> None:
        """See Observer."""
        again = f": steps {version + 1} to {made_before} are made again, from the same episodes"
        self.line(f"continues from version {version}{again if made_before > version else ''}")
        self._bar.update(self._job, completed=version)

    def step(self, report: StepReport) -> None:
        """See Observer."""
        if self._num_lines == 0:
            for explanation in _LEGEND:
                self.line(Text(explanation, style="dim"))
        if self._num_lines % 20 == 0:
            self.line(Text(" ".join(title.rjust(width) for title, _, _, width in _COLUMNS), style="bold"))
        self._num_lines += 1
        shown = {"run/step": float(report.step), **report.metrics}
        if "engine/busy_share" in shown:
            shown["engine/idle_share"] = 1 - shown["engine/busy_share"]
        cells = (
            (_number(form, shown[key], width) if key in shown else "-").rjust(width) for _, key, form, width in _COLUMNS
        )
        cause = report.signal.cause
        note = "made again" if report.made_before else cause
        self.line(" ".join(cells) + (f"  {note}" if note else ""))
        self._explain(report.signal)
        doing = "training again" if report.made_before else "training"
        self._bar.update(self._job, completed=report.step, description=doing, visible=True)

    def _explain(self, signal: LearningSignal) -> None:
        """Say why few groups are useful, once for each new cause."""
        if signal.cause is not None and signal.cause != self._explained:
            self.line(Text(f"{signal.cause}: {'. '.join(signal.lines())}", style="yellow"))
            self._explained = signal.cause

    def evaluating(self, done: int, total: int) -> None:
        """See Observer."""
        self._start_live()
        self._bar.update(self._measuring, completed=done, total=total, visible=done < total)

    def evaluated(self, result: EvalResult) -> None:
        """See Observer."""
        self._bar.update(self._measuring, visible=False)
        of_set = f", {result.set_name}" if result.set_name else ""
        self.line(Text(f"held out{of_set}, {result.versions}: {_quality(result)}", style="bold green"))
        self._bar.update(self._job, visible=True)

    def summary(self, summary: Summary, run_path: Path, report: Path) -> None:
        """Print the last panel."""
        table = Table.grid(padding=(0, 2))
        for before, after in ((summary.before, summary.after), *summary.others):
            of_set = f"{after.set_name}: " if after.set_name else ""
            table.add_row(f"{of_set}before", _quality(before))
            table.add_row(f"{of_set}after", _quality(after))
            table.add_row(f"{of_set}rise", f"{after.avg - before.avg:+.3f}")
        table.add_row("training", f"{summary.num_steps} steps in {summary.train_s / 60:.1f} min")
        if summary.num_refused:
            why = f"{summary.num_refused} of them, which changed no weight; logs/learner.log says why"
            table.add_row("refused", Text(why, style="yellow"))
        table.add_row(
            "async overlap", f"during {summary.overlap:.0%} of the learner's working time the engine generated"
        )
        is_noted = bool(summary.signal.cause) and summary.signal.remedy in summary.note
        for number, text in enumerate(summary.signal.lines()[: 1 if is_noted else None]):
            table.add_row("useful groups" if number == 0 else "", text)
        for name, seconds in self.phase_seconds.items():
            table.add_row(name, f"{seconds:.0f} s")
        if summary.note:
            table.add_row("note", Text(summary.note))
        table.add_row("run folder", Text(str(run_path)))
        table.add_row("report", Text(f"{report} (open it in a browser)"))
        self._console.print(Panel(table, title="done", expand=False))

    def _start_live(self) -> None:
        if self._console.is_terminal and not self._live.is_started:
            self._live.start()


class EvalConsole(Terminal):
    """Output of `agentrl eval` and other single jobs.

    Example:
        EvalConsole().evaluated(evaluation.result)
    """

    def evaluated(self, result: EvalResult) -> None:
        """Print avg@n, pass@k and how episodes ended."""
        is_versioned = result.policy_version or result.newest_version
        version = f", {result.versions}" if is_versioned else ""
        of_set = f"{result.set_name}: " if result.set_name else ""
        title = f"{of_set}{result.num_tasks} tasks, {result.n} samples each{version}"
        table = Table("measure", "value", "95 % interval", title=title)
        table.add_row(f"avg@{result.n}", f"{result.avg:.3f}", f"{result.avg_low:.3f} to {result.avg_high:.3f}")
        for k, estimate in result.pass_at.items():
            table.add_row(f"pass@{k}", f"{estimate.value:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}")
        self._console.print(table)
        stops = ", ".join(f"{reason} {count}" for reason, count in result.stop_reasons.items())
        self.line(
            f"{result.turns_mean:.1f} turns, {result.response_tokens_mean:.0f} tokens per episode; ended: {stops}"
        )


def show_error(error: BaseException) -> None:
    """Print an error on one screen, to standard error, with one line for each cause."""
    causes = _causes(error)
    body = Text(_beginning(str(error)) or type(error).__name__)
    if causes:
        body.append("\n\ncaused by\n" + "\n".join(f"  {line}" for line in causes), style="dim")
    body.append("\n\n--debug shows the whole traceback", style="dim")
    Console(stderr=True).print(Panel(body, title=type(error).__name__, border_style="red", expand=False))


def _causes(error: BaseException) -> list[str]:
    """One line for each cause, nearest first, without those that the message quotes."""
    causes: list[str] = []
    seen, cause = {id(error)}, error.__cause__
    while cause is not None and id(cause) not in seen and len(causes) < _MAX_CAUSES:
        seen.add(id(cause))
        said = {str(cause), *(str(getattr(cause, name, None) or cause) for name in ("strerror", "msg"))}
        if not str(cause) or not any(text in str(error) for text in said):
            causes.append(" ".join(f"{type(cause).__name__}: {cause}".split())[:200])
        cause = cause.__cause__
    return causes


def _beginning(message: str) -> str:
    """The message, cut to one screen."""
    message = message.strip()
    head = "\n".join(message.splitlines()[:_MAX_LINES])[:_MAX_CHARACTERS]
    return head if len(head) == len(message) else f"{head} ... (cut; {len(message)} characters)"


def _number(form: str, value: float, width: int) -> str:
    """The value; in scientific notation where it is too wide for its column."""
    text = form.format(value)
    return text if len(text) <= width else f"{value:.0e}"


def _quality(result: EvalResult) -> str:
    best = result.pass_at[result.n]
    return (
        f"avg@{result.n} {result.avg:.3f} [{result.avg_low:.3f}, {result.avg_high:.3f}], "
        f"pass@{result.n} {best.value:.3f} [{best.low:.3f}, {best.high:.3f}]"
    )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
