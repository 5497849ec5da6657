import asyncio
import io
import random
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import Words, learner_metrics, make_group

from agentrl.console import TrainConsole, duration, show_error
from agentrl.errors import AgentRLError, ConfigError, SandboxError
from agentrl.metrics import rollout_metrics
from agentrl.statistics import EvalResult, summarize


def screen(*, width: int = 80, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def shown(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def step_metrics(step: int) -> dict[str, float]:
    rng = random.Random(step)
    group = make_group(Words(), step, version=step, skill=0.5, rng=rng)
    return {**rollout_metrics([group]), **learner_metrics(step, rng)}


def an_evaluation(skill: float, *, version: int) -> EvalResult:
    rng, words = random.Random(0), Words()
    groups = [make_group(words, i, version=version, skill=skill, rng=rng, size=4) for i in range(12)]
    return summarize(groups, policy_version=version)


def error_screen(error: BaseException, *, debug: bool = False, logs: Path | None = None) -> str:
    console = screen()
    show_error(error, debug=debug, logs=logs, console=console)
    return shown(console)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_whole_run_is_shown(terminal: bool) -> None:
    console, before, after = screen(terminal=terminal), an_evaluation(0.2, version=0), an_evaluation(0.9, version=3)
    with TrainConsole(num_steps=3, max_minutes=8, console=console) as view:
        with view.phase("starting engine"):
            pass
        view.evaluation("before", before)
        for step in (1, 2, 3):
            view.step(step, step_metrics(step))
        view.note("engine restarted")
        view.summary(
            name="quickstart", num_steps=3, before=before, after=after, overlap=0.88, report=Path("runs/q/report.html")
        )
    text = shown(console)
    for part in (
        "starting engine",
        f"{before.avg:.3f} [",
        f"{after.avg - before.avg:+.3f}",
        "0.88",
        "engine restarted",
    ):
        assert part in text
    assert ("\x1b" in text) is terminal
    assert text.rstrip().endswith("report: runs/q/report.html")


@pytest.mark.parametrize("width", [80, 112, 160])
def test_step_lines_fit_the_width_and_are_aligned(width: int) -> None:
    console = screen(width=width)
    with TrainConsole(num_steps=9999, console=console) as view:
        view.step(7, step_metrics(7))
        view.step(9999, {**step_metrics(9999), **an_evaluation(0.5, version=1).metrics(), "learner/grad_norm": 12345.6})
    header, *lines = shown(console).splitlines()
    assert max(map(len, (header, *lines))) <= width
    assert {line.index("learner") for line in lines} == {header.index("who waits")}


def test_a_step_without_metrics_is_a_line_with_gaps() -> None:
    console = screen()
    with TrainConsole(num_steps=10, console=console) as view:
        view.step(1, {"rollout/reward_mean": 0.5})
    assert shown(console).splitlines()[1].split() == ["1", "0.500"]


def test_phases_may_overlap_and_are_timed() -> None:
    async def start(view: TrainConsole, name: str, seconds: float) -> None:
        with view.phase(name):
            await asyncio.sleep(seconds)

    async def both(view: TrainConsole) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(start(view, "engine", 0.05))
            group.create_task(start(view, "sandbox", 0.01))

    with TrainConsole(num_steps=1, console=screen(terminal=True)) as view:
        asyncio.run(both(view))
    assert list(view.phase_s) == ["sandbox", "engine"]
    assert view.phase_s["engine"] >= 0.05


@pytest.mark.parametrize(("error", "verdict"), [(asyncio.CancelledError, "cancelled"), (OSError, "failed")])
def test_a_phase_says_how_it_ended_and_lets_the_error_through(error: type[BaseException], verdict: str) -> None:
    console = screen()
    with TrainConsole(num_steps=1, console=console) as view, pytest.raises(error), view.phase("engine"):
        raise error
    assert f"engine: {verdict} after" in shown(console)


def test_the_terminal_gets_its_cursor_back_after_an_error() -> None:
    console = screen(terminal=True)
    with pytest.raises(AgentRLError), TrainConsole(num_steps=1, console=console):
        raise AgentRLError
    assert shown(console).rindex("\x1b[?25h") > shown(console).rindex("\x1b[?25l")


def test_an_error_says_what_where_why_and_the_mend() -> None:
    error = SandboxError("python tool: it is gone")
    error.__cause__ = RuntimeError("closed [red]x[/red]")
    error.__cause__.__cause__ = ConnectionError("refused")
    text = error_screen(error, logs=Path("runs/q/logs"))
    assert "Traceback" not in text
    for part in (
        "it is gone",
        "the sandbox",
        "RuntimeError: closed [red]x[/red]",
        "ConnectionError: refused",
        "runs/q/logs",
    ):
        assert part in text


def test_a_cause_already_quoted_by_its_message_is_not_repeated() -> None:
    error = SandboxError("python tool: OSError: disk full")
    error.__cause__ = OSError("disk full")
    assert error_screen(error).count("disk full") == 1


@pytest.mark.parametrize("message", ["row\n" * 500, "x" * 100_000])
def test_an_error_of_any_size_takes_one_screen(message: str) -> None:
    error: Exception = ValueError("the first " + message)
    for i in range(50):
        error, cause = ConfigError(f"{i} {message}"), error
        error.__cause__ = cause
    assert len(error_screen(error).splitlines()) <= 24


def test_of_a_group_the_first_real_failure_is_shown() -> None:
    group = BaseExceptionGroup(
        "tasks", [asyncio.CancelledError(), ExceptionGroup("g", [KeyError("k"), OSError("later")])]
    )
    text = error_screen(group)
    assert "KeyError" in text and "1 more failed" in text


def test_causes_that_form_a_circle_end() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert error_screen(first).count("ValueError: two") == 1


def test_debug_adds_the_traceback() -> None:
    try:
        raise OSError("disk full")
    except OSError as error:
        assert "test_console.py" in error_screen(error, debug=True)


@pytest.mark.parametrize(("seconds", "text"), [(47.6, "48s"), (372, "6m12s"), (7500, "2h05m"), (3599.7, "1h00m")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
