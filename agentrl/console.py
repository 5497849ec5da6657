"""What a person sees in the terminal: parts starting, one line a step, a summary, and errors on one screen.

Only shows what it is given: knows nothing of processes, engines or files. Where the output is not a terminal it writes
plain lines without control codes. Nothing here waits, so it may be called from asyncio code.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Task as ProgressTask
from rich.table import Table
from rich.text import Text
from rich.traceback import Traceback

from agentrl import errors
from agentrl.statistics import EvalResult

HEADER_EVERY = 20  # step lines
WIDE = 112  # columns that the spelt-out waits need
MAX_CAUSES = 6
MAX_MESSAGE_LINES, MAX_MESSAGE_CHARS = 10, 700


@dataclass(frozen=True, slots=True)
class _Column:
    """One number of the step line."""

    title: str
    metric: str
    width: int
    format: Callable[[float], str]


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _short(value: float) -> str:
    """At most five characters for anything from 0 to 10^7."""
    if value >= 99_999.5:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


COLUMNS = (
    _Column("reward", "rollout/reward_mean", 6, _fixed(3)),
    _Column("avg@n", "eval/avg_at_n", 5, _fixed(3)),
    _Column("ess", "learner/ess_ratio", 4, _fixed(2)),
    _Column("lr×", "learner/lr_scale", 4, _fixed(2)),
    _Column("grad", "learner/grad_norm", 5, _short),
    _Column("lag", "learner/lag_mean", 3, _fixed(1)),
    _Column("tok/s", "engine/tokens_per_s", 5, lambda value: f"{value:.0f}" if value < 99_999.5 else _short(value)),
    _Column("step_s", "learner/step_s", 6, lambda value: f"{value:.1f}s"),
)
WAITS = (("learner", "wait/learner_for_batch_s"), ("rollout", "wait/rollout_for_slot_s"))


class TrainConsole:
    """The view of one run. Use as a context manager, so that the terminal is left as it was."""

    def __init__(self, *, num_steps: int, max_minutes: float | None = None, console: Console | None = None) -> None:
        self.rich = console or Console(highlight=False)
        self.phase_s: dict[str, float] = {}  # seconds each phase took, in order of ending
        self._num_lines = 0
        self._step_width = max(4, len(str(num_steps)))
        self._phases = Progress(SpinnerColumn(), TextColumn("{task.description}", markup=False), _Elapsed())
        self._steps = Progress(
            TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(), _TimeLeft(max_minutes)
        )
        self._num_steps = num_steps
        self._bar: TaskID | None = None
        self._live = Live(Group(self._phases, self._steps), console=self.rich, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self.rich.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        """Take the bar away; what was printed above it stays."""
        if self._bar is not None:
            self._steps.update(self._bar, visible=False)
        self._live.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` with a spinner and its elapsed time until the block ends; several may run at once."""
        start_s, task = time.monotonic(), self._phases.add_task(name, total=None)
        if not self.rich.is_terminal:
            self._print(f"{name} ...")
        mark, verdict = "x", "failed after"
        try:
            yield
            mark, verdict = "✓", "done in"
        except (asyncio.CancelledError, KeyboardInterrupt):
            mark, verdict = "-", "cancelled after"
            raise
        finally:
            took_s = time.monotonic() - start_s
            self.phase_s[name] = self.phase_s.get(name, 0.0) + took_s
            self._phases.remove_task(task)
            style = {"✓": "green", "x": "bold red", "-": "yellow"}[mark]
            self._print(Text.assemble((mark, style), f" {name}: {verdict} {took_s:.1f} s"))

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._print(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One aligned line for a finished step, and the bar moved to `step`. Missing metrics leave a gap."""
        wide = self.rich.width >= WIDE
        if self._num_lines % HEADER_EVERY == 0:
            self._print(Text(self._header(), style="bold dim"))
        self._num_lines += 1
        self._print(self._line(step, metrics, wide=wide))
        if self._bar is None:
            self._bar = self._steps.add_task("steps", total=self._num_steps)
        self._steps.update(self._bar, completed=step)

    def evaluation(self, label: str, result: EvalResult) -> None:
        """One line for a measurement on held-out tasks."""
        self._print(Text.assemble(("◆", "cyan"), f" {label}: avg@{result.n} {_interval(result)} on ", _tasks(result)))

    def summary(
        self,
        *,
        name: str,
        num_steps: int,
        before: EvalResult | None,
        after: EvalResult | None,
        overlap: float | None,
        report: Path,
    ) -> None:
        """The closing panel: what was gained, how long each phase took, where the report is."""
        self._stop()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for label, text in _summary_rows(before, after, num_steps, overlap, self.phase_s):
            grid.add_row(label, text)
        self.rich.print(Panel(grid, title=Text(name), border_style="green", expand=False))
        self._print(f"report: {report}")

    def _header(self) -> str:
        titles = (column.title.rjust(column.width) for column in COLUMNS)
        return " ".join(["step".rjust(self._step_width), *titles, "who waits"])

    def _line(self, step: int, metrics: Mapping[str, float], *, wide: bool) -> Text:
        cells = [str(step).rjust(self._step_width)]
        for column in COLUMNS:
            value = metrics.get(column.metric)
            cells.append(("" if value is None else column.format(value)).rjust(column.width))
        return Text(" ".join(cells) + " ").append_text(_waits(metrics, wide=wide))

    def _print(self, text: str | Text) -> None:
        self.rich.print(text, markup=False, highlight=False, soft_wrap=True)


class _Elapsed(ProgressColumn):
    """Seconds since the phase began."""

    def render(self, task: ProgressTask) -> Text:
        return Text(f"{task.elapsed or 0.0:.0f} s", style="dim")


class _TimeLeft(ProgressColumn):
    """Elapsed time and what is left: of the steps at their mean speed, or of the time budget if that ends first."""

    def __init__(self, max_minutes: float | None) -> None:
        super().__init__()
        self._budget_s = None if max_minutes is None else max_minutes * 60

    def render(self, task: ProgressTask) -> Text:
        elapsed_s = task.elapsed or 0.0
        remaining_s = [elapsed_s / task.completed * task.remaining] if task.completed and task.remaining else []
        budget = ""
        if self._budget_s is not None and task.remaining:
            remaining_s.append(max(0.0, self._budget_s - elapsed_s))
            budget = f" of {duration(self._budget_s)}"
        left = f" · {duration(min(remaining_s))} left" if remaining_s else ""
        return Text(f"{duration(elapsed_s)}{budget}{left}", style="dim")


def duration(seconds: float) -> str:
    """`48s`, `6m12s` or `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def show_error(
    error: BaseException, *, debug: bool = False, logs: Path | None = None, console: Console | None = None
) -> None:
    """One screen on stderr: what failed, where, through which causes, and what to do; a traceback only for `debug`.

    Of an exception group the first failure that is not a cancellation is shown, the others are counted.
    """
    console = console or Console(stderr=True, highlight=False)
    leaves = [leaf for leaf in _leaves(error) if not isinstance(leaf, asyncio.CancelledError)] or [error]
    first, num_more = leaves[0], len(leaves) - 1
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("what", Text(_clip(str(first) or type(first).__name__)))
    grid.add_row("where", Text(_where(first)))
    for cause in _causes(first):
        grid.add_row("because", Text(cause, overflow="ellipsis", no_wrap=True))
    if num_more:
        grid.add_row("also", Text(f"{num_more} more failed after it"))
    grid.add_row("mend", Text(_mend(first, debug=debug)))
    if logs is not None:
        grid.add_row("logs", Text(str(logs)))
    console.print(Panel(grid, title=Text(type(first).__name__), border_style="red", title_align="left"))
    if debug:
        console.print(Traceback.from_exception(type(error), error, error.__traceback__))


PARTS: dict[type[BaseException], tuple[str, str]] = {
    errors.DataError: (
        "the data set",
        "Correct the row named above, or point env.train_data / env.eval_data elsewhere.",
    ),
    errors.MissingDependencyError: ("the installation", "Install what is named above."),
    errors.ConfigError: ("the configuration", "Correct the setting named above; nothing was started with it."),
    errors.SandboxError: ("the sandbox", "Its log says why it failed; no episode was scored because of it."),
    errors.WeightSyncError: (
        "the weights' way to the engine",
        "Do not trust the last step; the engine's log says more.",
    ),
    errors.EngineError: (
        "the engine",
        "Its log says why it failed; vLLM short of memory needs engine.kv_cache_bytes lower.",
    ),
    errors.LearnerError: (
        "the learner",
        "Its log says why; short of memory, lower rollout.max_context or groups_per_step.",
    ),
    errors.EnvError: ("the environment's own code", "Correct the environment class; the causes above end in its line."),
    errors.StaleTrajectoryError: ("the staleness bound", "This is a bug in agentrl: please report it with the logs."),
    errors.ErrorRateExceeded: ("the rollouts", "Too many episodes failed for one part; the first cause is above."),
}


def _part(error: BaseException) -> tuple[str, str] | None:
    return next((PARTS[kind] for kind in type(error).__mro__ if kind in PARTS), None)


def _where(error: BaseException) -> str:
    part = _part(error)
    if part is not None:
        return part[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "unknown"


def _mend(error: BaseException, *, debug: bool) -> str:
    part = _part(error)
    if part is not None:
        return part[1]
    return "Nobody foresaw this one." + ("" if debug else " Run again with --debug for the traceback.")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _causes(error: BaseException) -> list[str]:
    """One line a cause, from the nearest; a cause whose text the message above it quotes is not said twice."""
    lines: list[str] = []
    said, seen = str(error), {id(error)}
    cause = _cause_of(error)
    while cause is not None and id(cause) not in seen and len(lines) < MAX_CAUSES:
        seen.add(id(cause))
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        if not str(cause) or str(cause) not in said:
            lines.append(text)
        said, cause = str(cause), _cause_of(cause)
    return lines


def _cause_of(error: BaseException) -> BaseException | None:
    nearest = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return next(_leaves(nearest)) if nearest is not None else None


def _clip(message: str) -> str:
    """The beginning of a message, so that no message can fill more than a screen."""
    head = "\n".join(message.splitlines()[:MAX_MESSAGE_LINES])[:MAX_MESSAGE_CHARS]
    return head if len(head) == len(message) else f"{head} ... (cut; {len(message)} characters)"


def _waits(metrics: Mapping[str, float], *, wide: bool) -> Text:
    """`learner 0.4s | rollout 1.2s`, the longer wait marked: the part it waits for is the bottleneck."""
    waits = [(name, metrics[metric]) for name, metric in WAITS if metric in metrics]
    longest_s = max((wait_s for _, wait_s in waits), default=0.0)
    verb = " waits" if wide else ""
    text = Text()
    for name, wait_s in waits:
        style = "yellow" if wait_s == longest_s > 0 else ""
        text.append(" | " if text else "").append(f"{name}{verb} {wait_s:.1f}s", style=style)
    return text


def _summary_rows(
    before: EvalResult | None,
    after: EvalResult | None,
    num_steps: int,
    overlap: float | None,
    phase_s: Mapping[str, float],
) -> Sequence[tuple[str, str]]:
    rows = []
    if before is not None:
        rows.append(("before", f"avg@{before.n} {_interval(before)} on {_tasks(before)}"))
    if after is not None:
        gain = f"   {after.avg - before.avg:+.3f}" if before is not None else ""
        rows.append(("after", f"avg@{after.n} {_interval(after)} on {_tasks(after)}{gain}"))
    rows.append(("steps", str(num_steps)))
    if overlap is not None:
        rows.append(("overlap", f"{overlap:.2f} of the learner's time the engine was generating"))
    rows.append(("time", " · ".join(f"{name} {duration(seconds)}" for name, seconds in phase_s.items())))
    return rows


def _interval(result: EvalResult) -> str:
    return f"{result.avg:.3f} [{result.avg_low:.3f}, {result.avg_high:.3f}]"


def _tasks(result: EvalResult) -> str:
    return f"{result.num_tasks} tasks, policy version {result.policy_version}"
