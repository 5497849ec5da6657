import asyncio
import io
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.errors import ConfigError, SandboxError
from agentrl.report.console import _COLUMNS, EvalConsole, Terminal, TrainConsole, show_error
from agentrl.report.learning_signal import LearningSignal
from agentrl.report.metrics import rollout_metrics
from agentrl.report.observer import StepReport, Summary
from agentrl.report.statistics import EvalResult, summarize
from agentrl.run_folder import RunFolder
from agentrl.types import StepOutput
from tests.agentrl.report.synthetic_run import Words, learner_metrics, make_config, make_group


def screen(*, width: int = 80, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, soft_wrap=True)


def shown(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


NEVER_SOLVED = LearningSignal(groups=9, unsolved=9, variety=9, tokens=90, nats=90)


def report(step: int, metrics: dict[str, float], signal: LearningSignal | None = None) -> StepReport:
    output = StepOutput(policy_version=step, metrics={})
    signal = signal or LearningSignal()
    return StepReport(step=step, output=output, update=None, metrics=metrics, signal=signal)


def step_metrics(step: int) -> dict[str, float]:
    rng = random.Random(step)
    group = make_group(Words(), step, version=step, skill=0.5, rng=rng)
    return {**rollout_metrics([group]), **learner_metrics(step, rng)}


def an_evaluation(skill: float, *, version: int) -> EvalResult:
    rng, words = random.Random(0), Words()
    groups = [make_group(words, i, version=version, skill=skill, rng=rng, size=4) for i in range(12)]
    return summarize(groups, policy_version=version)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_whole_run_is_shown(terminal: bool) -> None:
    console, before, after = screen(terminal=terminal), an_evaluation(0.2, version=0), an_evaluation(0.9, version=3)
    with TrainConsole(total_steps=3, console=console) as view:
        with view.phase("starting the engine"):
            pass
        view.evaluating(3, 12)
        view.evaluated(before)
        for step in (1, 2, 3):
            view.step(report(step, step_metrics(step)))
    summary = Summary(
        num_steps=3, before=before, after=after, train_s=60.0, overlap=0.88, note="cut [red]short[/red]", num_refused=2
    )
    view.summary(summary, Path("runs/[q]"), Path("runs/[q]/report.html"))
    text = shown(console)
    refused = "2 of them, which changed no weight"
    for part in ("starting the engine", f"{before.avg:.3f} [", f"{after.avg - before.avg:+.3f}", "88%", refused):
        assert part in text
    assert "cut [red]short[/red]" in text and "runs/[q]/report.html" in text
    assert ("\x1b" in text) is terminal


def test_the_lines_of_several_sets_have_their_names() -> None:
    console, first = screen(width=200), an_evaluation(0.2, version=0)
    second = replace(an_evaluation(0.9, version=3), set_name="gsm8k")
    with TrainConsole(total_steps=3, console=console) as view:
        view.evaluated(second)
    others = ((replace(second, avg=0.5), second),)
    summary = Summary(num_steps=3, before=first, after=first, train_s=60.0, overlap=0.8, others=others)
    view.summary(summary, Path("runs/q"), Path("runs/q/report.html"))
    EvalConsole(console).evaluated(replace(second, newest_version=5))
    text = shown(console)
    for part in ("held out, gsm8k, version 3: avg@4", "gsm8k: before", "gsm8k: rise", f"{second.avg - 0.5:+.3f}"):
        assert part in text
    assert "gsm8k: 12 tasks, 4 samples each, versions 3 to 5" in text


def test_step_lines_fit_80_columns_and_are_aligned() -> None:
    console = screen()
    with TrainConsole(total_steps=9_999, console=console) as view:
        view.step(report(7, step_metrics(7)))
        huge = {"learner/grad_norm": 1234567.8, "engine/tokens_per_s": 123_456.0, "engine/busy_share": 0.0}
        view.step(report(9_999, {**step_metrics(9), **huge, "wait/learner_for_batch_s": 12.3}))
        view.step(report(3, {"rollout/reward_mean": 0.5}))
        view.step(report(8, step_metrics(8), signal=NEVER_SOLVED))
    *legend, header, one, two, three, four, why = shown(console).splitlines()
    assert max(map(len, (*legend, header, one, two, three, four))) <= 80
    assert {len(line) for line in (one, two, three)} == {len(header)}
    assert four.endswith("  none solved") and "easier tasks" in why


def test_what_waits_and_what_is_useful_is_read_from_one_line_which_a_legend_explains() -> None:
    console = screen()
    with TrainConsole(total_steps=1, console=console) as view:
        values = {"wait/learner_for_batch_s": 1.25, "engine/busy_share": 0.9, "rollout/useful_groups": 0.04}
        view.step(report(1, values))
        view.step(report(2, values))
    *legend, header, line, _ = shown(console).splitlines()
    assert header.split()[2] == "useful" and line.split()[2] == "4%" and line.split()[-2:] == ["1.2", "10%"]
    assert all(any(title in text for text in legend) for title, *_ in _COLUMNS if title not in ("step", "step s"))


def test_why_few_groups_are_useful_is_said_once_for_each_cause_and_at_the_end() -> None:
    console, before = screen(width=200), an_evaluation(0.2, version=0)
    with TrainConsole(total_steps=3, console=console) as view:
        for step in (1, 2):
            view.step(report(step, {}, signal=NEVER_SOLVED))
    assert shown(console).count(NEVER_SOLVED.outcome_sentence()) == 1
    summary = Summary(num_steps=2, before=before, after=before, train_s=60.0, overlap=0.5, signal=NEVER_SOLVED)
    view.summary(summary, Path("runs/q"), Path("runs/q/report.html"))
    assert "useful groups" in shown(console) and shown(console).count("0 % of 9 finished groups") == 2


def test_the_folder_is_named_at_the_start_and_whether_an_earlier_run_has_the_name(tmp_path: Path) -> None:
    console, config = screen(width=200), make_config()
    first, second = (RunFolder.create(tmp_path, config.name, config=config) for _ in range(2))
    with TrainConsole(total_steps=1, console=console) as view:
        view.run_folder(first.path)
        assert f"run folder: {first.path}\n" in shown(console)
        view.run_folder(second.path)
        first.journal.touch()
        view.run_folder(first.path)
    assert f"run folder: {second.path}; {first.path} is an earlier run of this name\n" in shown(console)
    assert f"agentrl status {second.path} --watch" in shown(console) and str(second.report) in shown(console)
    assert f"run folder: {first.path}, which continues\n" in shown(console)


def test_steps_that_are_made_again_are_marked() -> None:
    console = screen()
    with TrainConsole(total_steps=9, console=console) as view:
        view.resumed(2, 3)
        view.step(replace(report(3, step_metrics(3)), made_before=True))
        view.step(report(4, step_metrics(4)))
    lines = shown(console).splitlines()
    assert lines[0] == "continues from version 2: steps 3 to 3 are made again, from the same episodes"
    assert lines[-2].endswith("  made again") and "again" not in lines[-1] and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("error", "ending"), [(asyncio.CancelledError, "stopped"), (KeyboardInterrupt, "stopped"), (OSError, "failed")]
)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_phase_says_how_it_ended_and_lets_the_error_through(
    error: type[BaseException], ending: str, terminal: bool
) -> None:
    console = screen(terminal=terminal)
    with pytest.raises(error), Terminal(console).phase("engine"):
        raise error
    assert f"engine: {ending} after" in shown(console)


def test_a_progress_says_how_it_ended() -> None:
    console = screen(terminal=True)
    with pytest.raises(OSError), Terminal(console).phase("checking") as advance:
        advance(1, 2)
        raise OSError
    assert "checking: failed after" in shown(console)


def test_phases_that_overlap_are_both_timed() -> None:
    async def start(view: Terminal, name: str, seconds: float) -> None:
        with view.phase(name):
            await asyncio.sleep(seconds)

    async def both(view: Terminal) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(start(view, "engine", 0.05))
            group.create_task(start(view, "sandbox", 0.01))

    view = Terminal(screen(terminal=True))
    asyncio.run(both(view))
    assert list(view.phase_seconds) == ["sandbox", "engine"]
    assert view.phase_seconds["engine"] >= 0.05


def test_brackets_in_a_line_are_text() -> None:
    console = screen()
    Terminal(console).line("[bold]x[/bold] [/nothing]")
    assert shown(console) == "[bold]x[/bold] [/nothing]\n"


def test_an_evaluation_shows_every_interval() -> None:
    console, result = screen(), an_evaluation(0.5, version=0)
    EvalConsole(console).evaluated(result)
    for part in ("avg@4", "pass@1", "pass@4", f"{result.avg_low:.3f} to {result.avg_high:.3f}", "completed"):
        assert part in shown(console)


def test_an_error_says_what_and_why_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = SandboxError("python tool: it is gone")
    error.__cause__ = RuntimeError("closed [red]x[/red]")
    error.__cause__.__cause__ = ConnectionError("refused")
    show_error(error)
    text = capsys.readouterr().err
    for part in ("SandboxError", "it is gone", "RuntimeError: closed [red]x[/red]", "ConnectionError: refused"):
        assert part in text
    assert "Traceback" not in text


def test_a_cause_the_message_quotes_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    error = SandboxError("python tool: OSError: disk full")
    error.__cause__ = OSError("disk full")
    show_error(error)
    assert capsys.readouterr().err.count("disk full") == 1


@pytest.mark.parametrize("message", ["row\n" * 500, "x" * 100_000])
def test_an_error_of_any_size_takes_one_screen(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error: Exception = ValueError("the first " + message)
    for i in range(50):
        error, cause = ConfigError(f"{i} {message}"), error
        error.__cause__ = cause
    show_error(error)
    assert len(capsys.readouterr().err.splitlines()) <= 36


def test_causes_that_form_a_circle_end(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    show_error(first)
    assert capsys.readouterr().err.count("ValueError: two") == 1
