"""status.json is whole at every read, judged by its heartbeat and its process, and invalid files are reported."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.errors import ConfigError, EngineError
from agentrl.supervision.status import (
    FILE_NAME,
    RunState,
    RunStatus,
    StatusFile,
    Writer,
    assess,
    newest_run,
    read_status,
)
from agentrl.supervision.wait_graph import Gauges, WaitGraph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder."""
    run = tmp_path / "runs" / "quick"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    return run


def written(folder: Path, wait_graph: WaitGraph | None = None) -> StatusFile:
    return StatusFile(folder, wait_graph or WaitGraph(), stall_timeout_s=900.0, every_s=0.02)


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Return as soon as the condition holds. Raises AssertionError after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def state_of(folder: Path, status: RunStatus) -> RunState:
    return assess(status, folder).state


def test_what_the_board_says_is_read_back(folder: Path) -> None:
    wait_graph = WaitGraph()
    wait_graph.measure(lambda: Gauges(step=3, num_steps=9, ledger={"issued": 5}))
    with written(folder, wait_graph), wait_graph.phase("training"):
        with wait_graph.waiting("training loop", on="rollouts", what="a full batch"):
            wait_until(lambda: read_status(folder).progress.waits != ())
            status = read_status(folder)
        assert assess(status, folder).state is RunState.RUNNING
    assert status.writer.pid == os.getpid()
    assert status.progress.phase == "training"
    assert status.progress.gauges == Gauges(step=3, num_steps=9, ledger={"issued": 5})
    assert [str(wait)[:56] for wait in status.progress.waits] == [
        "the training loop waits for the rollouts (a full batch, "
    ]


def test_a_reader_never_sees_half_a_file(folder: Path) -> None:
    wait_graph = WaitGraph()
    with StatusFile(folder, wait_graph, stall_timeout_s=900.0, every_s=0.0005):
        for number in range(400):
            with wait_graph.waiting("training loop", on="rollouts", what="x" * (number * 50)):
                read_status(folder)
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (None, RunState.DONE, "The run is done"),
        (EngineError("it is on fire"), RunState.FAILED, "The run failed: EngineError: it is on fire"),
        (KeyboardInterrupt(), RunState.STOPPED, "The run was stopped"),
        (asyncio.CancelledError(), RunState.STOPPED, "The run was stopped"),
    ],
)
def test_the_end_is_written_last_and_says_how(
    folder: Path, error: BaseException | None, state: RunState, why: str
) -> None:
    try:
        with written(folder):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    time.sleep(0.1)
    verdict = assess(read_status(folder), folder)
    assert (verdict.state, verdict.sentence) == (state, why)
    assert verdict.advice == (
        "" if error is None else f"`agentrl train --resume {folder}` continues from the last checkpoint"
    )


def test_a_run_that_was_killed_is_dead(folder: Path) -> None:
    program = (
        "import sys, time, pathlib; from agentrl.supervision.wait_graph import WaitGraph\n"
        "from agentrl.supervision.status import StatusFile\n"
        "with StatusFile(pathlib.Path(sys.argv[1]), WaitGraph(), stall_timeout_s=900):\n"
        "    print('on', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        assert state_of(folder, read_status(folder)) is RunState.RUNNING
        process.kill()
    verdict = assess(read_status(folder), folder)
    assert verdict.state is RunState.DEAD
    assert f"process {process.pid} is gone" in verdict.sentence
    assert f"agentrl train --resume {folder}" in verdict.advice


def changed(folder: Path, **changes: Any) -> RunStatus:
    """The status of a living run, as if it said something else."""
    with written(folder):
        return replace(read_status(folder), **changes)


def test_another_process_with_the_same_number_is_not_the_run(folder: Path) -> None:
    writer = replace(Writer.this_process(), started="1")
    assert state_of(folder, changed(folder, writer=writer)) is RunState.DEAD


def test_a_run_that_lives_and_is_silent_is_stalled(folder: Path) -> None:
    status = changed(folder)
    old = replace(status, heartbeat_up_s=status.heartbeat_up_s - 100)
    verdict = assess(old, folder)
    assert verdict.state is RunState.STALLED
    assert "exists and has not reported for 100 s" in verdict.sentence


def test_a_wall_clock_that_jumps_makes_no_run_old(folder: Path) -> None:
    assert state_of(folder, changed(folder, heartbeat_at=0.0)) is RunState.RUNNING


def test_a_run_on_another_machine_is_judged_by_its_heartbeat(folder: Path) -> None:
    elsewhere = Writer(pid=1, started="1", machine="node-7/boot")
    assert state_of(folder, changed(folder, writer=elsewhere)) is RunState.RUNNING
    verdict = assess(changed(folder, writer=elsewhere, heartbeat_at=time.time() - 300), folder)
    assert verdict.state is RunState.DEAD
    assert "node-7, which cannot be seen from here" in verdict.sentence


def test_a_run_in_which_nothing_moves_is_stalled_long_before_the_watchdog_ends_it(folder: Path) -> None:
    status = changed(folder)
    quiet = replace(status, progress=replace(status.progress, quiet_s=400.0))
    assert "nothing moved for 7 min" in assess(quiet, folder).sentence
    blocked = replace(status, progress=replace(status.progress, loop_quiet_s=30.0))
    assert "its event loop has stood still for 30 s" in assess(blocked, folder).sentence


@pytest.mark.parametrize(
    ("content", "saying"),
    [
        (b"", "is incomplete"),
        (b'{"format": 1, "run": "qui', "is incomplete"),
        (b"\xff\xfe", "is incomplete"),
        (b"[1, 2]", "is incomplete"),
        (b'{"format": 0}', "has format 0, this agentrl reads format 1"),
        (b"{}", "has format 0"),
        (b'{"format": 1, "run": 3}', "was not written by agentrl"),
    ],
)
def test_a_file_that_is_no_status_is_named_in_one_sentence(folder: Path, content: bytes, saying: str) -> None:
    (folder / FILE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=saying) as caught:
        read_status(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_folders_that_are_no_runs_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_status(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a run folder"):
        read_status(tmp_path)
    with pytest.raises(ConfigError, match=r"has no status\.json"):
        read_status(folder)


def test_the_newest_run_is_the_one_that_wrote_last(folder: Path) -> None:
    runs = folder.parent
    with written(folder):
        pass
    other = runs / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    os.utime(other / "config.json", (0, 0))
    assert newest_run(runs) == folder
    with pytest.raises(ConfigError, match="there is no run in"):
        newest_run(runs / "nowhere")


def test_a_full_disk_ends_no_run_and_leaves_the_last_status(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with written(folder) as status_file:
        os.rename(folder, folder.with_name("moved"))
        wait_until(lambda: "cannot be written" in caplog.text)
        time.sleep(0.1)  # several more writes fail
        assert len(caplog.records) == 1
        os.rename(folder.with_name("moved"), folder)
        status_file.end("stopped")
    assert state_of(folder, read_status(folder)) is RunState.STOPPED


def test_speeds_are_those_of_the_counters(folder: Path) -> None:
    wait_graph, tokens = WaitGraph(), [0]
    wait_graph.measure(lambda: Gauges(num_tokens=tokens[0]))
    began = time.monotonic()
    with written(folder, wait_graph):
        for _ in range(10):
            tokens[0] += 50
            wait_graph.loop_turned()
            time.sleep(0.05)
        wait_until(lambda: read_status(folder).progress.gauges.num_tokens == 500)
        rate = read_status(folder).tokens_per_s
    true_rate = 500 / (time.monotonic() - began)  # about 1000/s where the machine has nothing else to do
    assert rate is not None and 0.3 * true_rate < rate < 1.5 * true_rate


def test_the_file_is_json_that_other_programs_read(folder: Path) -> None:
    with written(folder):
        pass
    tree = msgspec.json.decode((folder / FILE_NAME).read_bytes())
    assert tree["ending"] == "done" and tree["progress"]["gauges"]["step"] == 0
