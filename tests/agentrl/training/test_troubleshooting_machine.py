"""What the machine does to a run: its disk fills up, its pipe closes, its clock jumps, its memory runs out."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.errors import DiskError
from agentrl.report.console import TrainConsole
from agentrl.report.metrics import MetricsLog, read
from agentrl.report.observer import StepReport
from agentrl.run_folder import RunFolder
from agentrl.supervision.child import ChildDied, child
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import StepOutput
from tests.agentrl.training.troubles import Trouble
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with

ROOT = Path(__file__).parents[3]
JOURNAL_FULL = Trouble(
    "writing the run's journal ...: OperationalError: database or disk is full. Free space on its disk"
)
DISK_FULL = Trouble("cannot write ...: No space left on device. Free space on its disk (df -h ...)")
NO_OUTPUT = Trouble("standard output can no longer be written (...): the work continues without it")
NO_MEMORY = Trouble(
    "the ... process ended with exit code ...; while it ran, the kernel ended ... because memory ran out"
)
ALONE = [sys.executable, "-m", "tests.agentrl.training.whole_run_alone"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}


def can_mount(folder: Path) -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=4096", "none", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_a_disk_that_fills_up_ends_the_run_by_name_and_with_room_it_goes_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("mounting a file system is not permitted here")
    command = ["unshare", "-rm", *ALONE, str(tmp_path), str(tokenizer_dir), "--tmpfs", "4000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    screen = done.stderr.replace("│", " ")
    assert JOURNAL_FULL.is_in(screen) or DISK_FULL.is_in(screen), screen
    assert "agentrl train --resume" in screen
    assert "ended with 1" in done.stdout
    # Every step was made and trained on once: those before the disk was full and those after.
    assert "steps [1, 2, 3, 4], groups {1: 2, 2: 2, 3: 2, 4: 2}" in done.stdout


def test_a_metric_that_cannot_be_written_is_named_with_its_file(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunFolder.create(config.out_dir, config.name, config=config)
    metrics = MetricsLog(run)
    metrics._file.close()
    metrics._file = Path("/dev/full").open("w")  # noqa: SIM115 - it cannot even be closed
    with pytest.raises(DiskError) as found:
        metrics.log("step", 1, {"run/step_s": 1.0})
    assert DISK_FULL.is_in(found.value) and f"cannot write {run.metrics}" in str(found.value)
    with pytest.raises(DiskError):
        metrics.close()


def test_a_run_outlives_its_standard_output(tmp_path: Path, tokenizer_dir: Path) -> None:
    line = " ".join([*ALONE, str(tmp_path), str(tokenizer_dir), "--steps", "6", "| head -1; exit ${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert NO_OUTPUT.is_in(done.stderr)
    assert [line.step for line in read(tmp_path / "t/metrics.jsonl") if line.kind == "step"] == [1, 2, 3, 4, 5, 6]


HANGS_UP = """
import asyncio, os, signal, sys, typer
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
from agentrl.cli.options import run
async def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.3)
        print("went on")
    finally:
        print("cleaned up")
try:
    run(work(), debug=False)
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


@pytest.mark.parametrize(
    ("before", "code", "said"), [("SIG_DFL", 130, "cleaned up\n"), ("SIG_IGN", 0, "went on\ncleaned up\n")]
)
def test_a_terminal_that_closes_ends_the_work_politely_but_not_under_nohup(before: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", HANGS_UP, before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (code, said)


def test_a_log_on_a_full_disk_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console = TrainConsole(total_steps=2)
        for step in (1, 2):
            output = StepOutput(policy_version=step, metrics={})
            console.step(StepReport(step=step, output=output, update=None, metrics={}))
    assert NO_OUTPUT.is_in(caplog.text) and len(caplog.records) == 1


async def test_a_clock_that_jumps_moves_no_deadline(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves the clock a day forward at one step and two days back at the next. Deadlines are in seconds."""
    real, jumps = time.time, iter([86_400.0, -86_400.0] * 100)
    offset = [0.0]

    class Jumping(YesAndNo):
        def _alternate(self, prompt: str) -> str:
            offset[0] = next(jumps, 0.0)
            return super()._alternate(prompt)

    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    summary, batches = await run_with(make_config(tmp_path, steps=6), Jumping(tokenizer), tokenizer)
    assert summary.num_steps == 6 and len(batches) == 6
    assert 0 < summary.train_s < 60


WALL_CLOCK = {
    "agentrl/report/metrics.py": "when a line was written, for people",
    "agentrl/report/sinks/tensorboard.py": "time stamps for people",
    "agentrl/chat/openai_schema.py": "the `created` of OpenAI's answers",
    "agentrl/supervision/status.py": "when a heartbeat was written, for another process",
    "agentrl/cli/doctor/machine.py": "whether the clock itself is right",
    "sandbox/backends/docker.py": "how old another process's container is",
    "agentrl/rollouts/generation.py": "where a generation is drawn in the timeline, beside other processes' episodes",
    "agentrl/rollouts/episode.py": "where an episode is drawn in the timeline; its duration is measured apart",
    "agentrl/training/training_loop.py": "where a step is drawn in the timeline",
}


def test_nobody_measures_time_by_the_clock_on_the_wall() -> None:
    users = set()
    for package in ("agentrl", "trainer", "sandbox", "envs"):
        for path in (ROOT / package).rglob("*.py"):
            names = {
                ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            if names & {"time.time", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}:
                users.add(str(path.relative_to(ROOT)))
    assert users <= set(WALL_CLOCK)


def memory_group() -> Path | None:
    """A cgroup of our own that holds 64 MB; None where none can be made."""
    limits = {"memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"), "memory.max": Path("/sys/fs/cgroup")}
    for name, parent in limits.items():
        group = parent / f"agentrl-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / name).write_text(str(64 * 2**20))
                return group
            except OSError:
                group.rmdir()
    return None


async def test_a_part_that_the_kernel_ends_for_want_of_memory_is_said_to_be_one(tmp_path: Path) -> None:
    if (group := memory_group()) is None:
        pytest.skip("limiting memory is not permitted here")
    try:
        eats = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); kept = [bytearray(2**20) for _ in range(400)]"
        async with child("learner", [sys.executable, "-c", eats], log_path=tmp_path / "log") as part:
            with pytest.raises(ChildDied) as found:
                await part.watch()
        assert NO_MEMORY.is_in(found.value) and "(SIGKILL)" in str(found.value)
    finally:
        await asyncio.sleep(0.1)
        group.rmdir()
