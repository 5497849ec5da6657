"""The command line of the asynchronous benchmark: its help, its errors, and its end when it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks.asynchrony import __main__ as command
from benchmarks.asynchrony import sweep as sweeps
from benchmarks.asynchrony.arms import ARMS


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"mean_wait_s": 3.0, "calls_mean": 1.0}))
    monkeypatch.setattr(command.calibration, "__defaults__", (path,))
    return path


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(list(arguments)) == 1
    return capsys.readouterr().err


def test_help_names_every_command_arm_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--help"], ["calibrate ", "predict ", "run ", "report ", "--kind speed"]),
        (["run", "--help"], [*ARMS, "default: score", "as many more as the arm may lag"]),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        text = " ".join(capsys.readouterr().out.split())
        assert ended.value.code == 0
        assert [word for word in expected if word not in text] == []


def test_a_wrong_arm_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["run", "--arms", "A3"])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and "'A3'" in text and "'A4'" in text


def test_without_a_calibration_nothing_is_run(
    capsys: pytest.CaptureFixture[str], calibrated: Path, tmp_path: Path
) -> None:
    calibrated.write_text("{}")
    assert "is no calibration" in failed(capsys, "run", "--runs", str(tmp_path / "runs.jsonl"))
    calibrated.unlink()
    error = failed(capsys, "run", "--runs", str(tmp_path / "runs.jsonl"))
    assert f"{calibrated} is missing" in error and "benchmarks.asynchrony calibrate" in error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "6", "--arms", "S1", "A4"], "the first 6 steps of A4 are not counted; use 7 or more"),
        (["--max-others", "12"], "it is a share"),
        (["--sigmas", "-1"], "a spread is 0 or more"),
        (["--sigmas"], "add --no-wait"),
    ],
)
def test_options_that_give_no_number_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert expected in failed(capsys, "run", *options)


@pytest.mark.usefixtures("calibrated")
def test_a_broken_record_is_named_by_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    whole = {"arm": "A4", "sigma": 1.0, "mean_wait_s": 3.0, "seed": 0, "kind": "score", "real_sleep": False}
    whole["steps"] = []
    for second, expected in (
        (json.dumps(whole)[:40], "runs.jsonl:2: not a whole record"),
        (json.dumps({**whole, "arm": "A3"}), "record 2 is of arm 'A3'"),
        (json.dumps({"arm": "A4"}), "record 2 has no sigma, mean_wait_s"),
    ):
        runs.write_text(json.dumps(whole) + "\n" + second + "\n")
        assert expected in failed(capsys, "run", "--runs", str(runs))
        assert expected in failed(capsys, "report", "--runs", str(runs))
    assert "no such file" in failed(capsys, "report", "--runs", str(tmp_path / "typo.jsonl"))


def test_what_was_measured_or_predicted_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.touch()
    for name in ("CALIBRATION", "RUNS"):
        monkeypatch.setattr(command, name, there)
    assert "the runs belong to it" in failed(capsys, "calibrate")
    assert "is no prediction" in failed(capsys, "predict")
    assert there.read_text() == ""


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_told_to_stop_cleans_up_and_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    cleaned_up: list[int] = []

    async def sweep(given: argparse.Namespace, **numbers: float) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.append(number)

    monkeypatch.setattr(command, "sweep", sweep)
    assert command.main(["run", "--runs", str(tmp_path / "runs.jsonl")]) == 130
    assert cleaned_up == [number]
    assert capsys.readouterr().err == "stopped: what was finished is kept, and the same command goes on\n"


def test_a_sweep_makes_what_is_missing_and_as_many_steps_as_the_arm_needs() -> None:
    options = ["--arms", "S1", "A8", "--sigmas", "1", "--seeds", "0", "1", "--no-wait"]
    given = command.parser().parse_args(["run", *options])
    cells = sweeps.cells(given, 3.0)
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert {(cell.arm, cell.num_steps) for cell in cells} == {("S1", 16), ("A8", 24)}
    done = {"arm": "S1", "sigma": 1.0, "mean_wait_s": 3.0, "seed": 0, "kind": "score", "real_sleep": False}
    assert [cell for cell in cells if sweeps.is_done(cell, [done])] == [
        next(cell for cell in cells if (cell.arm, cell.sigma, cell.seed) == ("S1", 1.0, 0))
    ]
    assert not any(sweeps.is_done(cell, [{**done, "kind": "speed"}, {**done, "mean_wait_s": 2.0}]) for cell in cells)
