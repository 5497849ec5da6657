"""`agentrl status` on the command line: each state, the newest run, live, JSON, and bad input."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli.main import app
from agentrl.errors import EngineError
from agentrl.supervision.status import FILE_NAME, StatusFile
from agentrl.supervision.wait_graph import Gauges, WaitGraph


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in runs/ of the current directory."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs", "quick")
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    return run


def agentrl(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["status", *arguments])


def a_run(folder: Path) -> tuple[StatusFile, WaitGraph]:
    wait_graph = WaitGraph()
    gauges = Gauges(step=3, num_steps=9, version=3, lag=1, max_lag=2, ledger={"issued": 12, "failed": 0, "trained": 8})
    gauges = replace(gauges, useful_groups=0.1, learning=("10 % of 40 finished groups were useful", "a remedy"))
    wait_graph.measure(lambda: gauges)
    placement = "learner on GPU 0; engine on GPU 1; weights by nccl"
    return StatusFile(folder, wait_graph, stall_timeout_s=900.0, every_s=0.05, placement=placement), wait_graph


def test_a_living_run_shows_who_waits_for_whom_its_lag_and_its_ledger(folder: Path) -> None:
    status_file, wait_graph = a_run(folder)
    with wait_graph.waiting("training loop", on="rollouts", what="a full batch"), status_file:
        result = agentrl(str(folder))
    assert result.exit_code == 0
    for text in (
        "quick: running",
        "The run is alive",
        "3 of 9",
        "1 in the last batch, at most 2",
        "issued 12, trained 8",
        "10 % of 40 finished groups were useful",
        "a remedy",
        "learner on GPU 0; engine on GPU 1; weights by nccl",
        "the training loop waits for the rollouts (a full batch, ",
    ):
        assert text in result.stdout


def test_without_an_argument_it_is_the_newest_run(folder: Path) -> None:
    with a_run(folder)[0]:
        pass
    result = agentrl()
    assert result.exit_code == 0
    assert "quick: done" in result.stdout


def test_a_run_that_is_over_waits_for_nobody_and_has_nothing_to_go(folder: Path) -> None:
    status_file, wait_graph = a_run(folder)
    with wait_graph.waiting("training loop", on="rollouts", what="a full batch"):
        with status_file:
            time.sleep(0.2)
        result = agentrl(str(folder))
    assert "quick: done" in result.stdout
    assert not [text for text in ("waits for", "to go") if text in result.stdout]


def test_a_stopped_run_waits_for_nobody_either_and_is_found_by_its_name(folder: Path) -> None:
    status_file, wait_graph = a_run(folder)
    with wait_graph.waiting("training loop", on="rollouts", what="a full batch"):
        with pytest.raises(KeyboardInterrupt), status_file:
            raise KeyboardInterrupt
        result = agentrl(folder.name)
    assert "quick: stopped" in result.stdout and "ended in" in result.stdout
    assert not [text for text in ("waits for", "waiting", "generating", "queues") if text in result.stdout]
    result = agentrl("quack")
    assert result.exit_code == 2 and "Similar: runs/quick" in result.stderr


def test_a_failed_run_says_why_and_how_to_go_on(folder: Path) -> None:
    with pytest.raises(EngineError), a_run(folder)[0]:
        raise EngineError("[no] engine")
    result = agentrl(str(folder))
    assert result.exit_code == 1
    assert "The run failed: EngineError: [no] engine" in result.stdout
    assert f"agentrl train --resume {folder}" in result.stdout


def test_a_silent_run_is_looked_at_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cli.status.SECOND_LOOK_S", 0.2)
    status_file, _ = a_run(folder)
    with status_file:
        written = json.loads((folder / FILE_NAME).read_text())
    written |= {"heartbeat_up_s": written["heartbeat_up_s"] - 100, "ending": ""}
    (folder / FILE_NAME).write_text(json.dumps(written))
    assert "quick: stalled" in agentrl(str(folder)).stdout
    # As after a suspend: the old file is there for a moment more.
    (folder / FILE_NAME).write_text(json.dumps(written))
    fresh = folder / "fresh"
    fresh.write_text(json.dumps(written | {"heartbeat_up_s": written["heartbeat_up_s"] + 100}))
    timer = threading.Timer(0.1, lambda: fresh.replace(folder / FILE_NAME))
    timer.start()
    assert "quick: running" in agentrl(str(folder)).stdout
    timer.join()


def test_json_is_one_object_with_the_verdict_and_the_numbers(folder: Path) -> None:
    with a_run(folder)[0]:
        result = agentrl(str(folder), "--json")
    found = json.loads(result.stdout)
    assert (found["state"], found["advice"]) == ("running", "")
    assert found["progress"]["gauges"]["ledger"] == {"issued": 12, "failed": 0, "trained": 8}


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_watch_follows_the_run_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    monkeypatch.setattr("agentrl.cli.status.REFRESH_S", 0.05)
    status_file, wait_graph = a_run(folder)

    def play() -> None:
        with status_file, wait_graph.phase("training"):
            time.sleep(0.5)

    run = threading.Thread(target=play)
    run.start()
    while not (folder / FILE_NAME).exists():
        time.sleep(0.01)
    result = agentrl(str(folder), "--watch", *option)
    run.join()
    assert result.exit_code == 0
    if option:
        states = [json.loads(line)["state"] for line in result.stdout.splitlines()]
        assert set(states[:-1]) == {"running"} and states[-1] == "done"
    else:
        assert "quick: done" in result.stdout


@pytest.mark.parametrize(
    ("content", "saying"), [(None, "has no status.json"), ("{", "is incomplete"), ('{"format": 99}', "has format 99")]
)
def test_bad_files_are_one_screen_and_exit_code_2(folder: Path, content: str | None, saying: str) -> None:
    if content is not None:
        (folder / FILE_NAME).write_text(content)
    result = agentrl(str(folder))
    assert result.exit_code == 2
    assert saying in " ".join(result.stderr.replace("│", " ").split())
    assert len(result.stderr.splitlines()) < 15


def test_no_run_anywhere_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = agentrl()
    assert result.exit_code == 2
    assert "there is no run in runs/" in result.stderr
