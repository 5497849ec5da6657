"""`agentrl train` as a user runs it: real sandbox, real vLLM, real DeepSpeed, and the ways it can be cut off.

The tests tell the story of one run and run in this order: its engine is killed, and killed again, it is resumed and
interrupted, resumed and killed, resumed and trained to its end, and then its folder is judged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl import config as configs
from agentrl.engine.vllm_command import MODULE
from agentrl.report.metrics import MetricsLine, read
from agentrl.run_folder import RunFolder
from tests.device import engine_settings
from tests.e2e.kill_judge import judge

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]

ENV_FILE = Path(__file__).parent / "kill_env.py"
MARK = "AGENTRL_TEST_MARK"
MORE_STEPS = 2  # after the last resume


class Run:
    """One run in a folder of its own; every process it starts carries a mark in its environment.

    `start` is `agentrl train` with a config, `resume` is `agentrl train --resume`, on the same folder.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.config = folder / "config.yaml"
        config = {
            "name": "e2e",
            "out_dir": str(folder / "runs"),
            "env": {"target": f"{ENV_FILE}:EvenTotal"},
            "model": {"path": str(model)},
            "rollout": {"groups_per_step": 2, "group_size": 4, "max_context": 384, "max_turn_tokens": 32},
            "engine": engine_settings(max_num_seqs=16, max_restarts=1),
            "learner": {"lr": 1e-5},  # the task is easy: at 1e-3 all groups were solved after four steps
            "eval": {"num_tasks": 4, "samples_per_task": 2, "every": 2},
            "train": {"steps": 500},
        }
        self.config.write_text(json.dumps(config))
        self.num_starts = 0

    def start(self) -> None:
        self._train(str(self.config))

    def resume(self, *overrides: str) -> None:
        self._train("--resume", str(self.path), *overrides)

    def _train(self, *arguments: str) -> None:
        self.num_starts += 1
        self.log = self.folder / f"out-{self.num_starts}.log"
        command = [sys.executable, "-m", "agentrl", "train", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, MARK: self.mark}, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What the last start wrote."""
        return self.log.read_text()

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "e2e"

    def wait_for(self, condition: Callable[[], bool], seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def steps(self) -> list[MetricsLine]:
        metrics = self.path / "metrics.jsonl"
        return [line for line in read(metrics) if line.kind == "step"] if metrics.exists() else []

    def wait_for_a_step(self) -> None:
        """Wait until a step is made after those that are there now."""
        made = len(self.steps())
        self.wait_for(lambda: len(self.steps()) > made)

    def kill_engine(self) -> None:
        for pid in self.pids(MODULE):
            if "guard.py" not in _read(pid, "cmdline"):
                os.kill(pid, signal.SIGKILL)

    def pids(self, needle: str = "") -> list[int]:
        return [pid for pid in _pids() if self.mark in _read(pid, "environ") and needle in _read(pid, "cmdline")]

    def left_over(self, seconds: float = 25) -> list[int]:
        deadline = time.monotonic() + seconds
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return pids


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("train"), tiny_model_dir)
    yield run
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)


def test_it_trains(run: Run) -> None:
    run.start()
    run.wait_for_a_step()


def test_a_killed_engine_is_started_again(run: Run) -> None:
    run.kill_engine()
    run.wait_for(lambda: [line.values["engine/restarts"] for line in run.steps()][-3:] == [1.0] * 3)
    assert all(line.values["ledger/failed"] == 0 for line in run.steps())


def test_an_engine_that_dies_once_more_ends_the_run_by_name(run: Run) -> None:
    run.kill_engine()
    assert run.process.wait(60) == 1, run.output
    assert "engine process ended" in run.output
    assert run.left_over() == []


def test_ctrl_c_stops_every_part_and_keeps_what_was_done(run: Run) -> None:
    run.resume()
    run.wait_for_a_step()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output
    assert "interrupted" in run.output
    assert run.left_over() == []
    assert (run.path / "report.html").exists()
    assert list(Path("/dev/shm").glob(f"agentrl-weights-{run.process.pid}-*")) == []


def test_killing_the_command_itself_leaves_no_orphan(run: Run) -> None:
    run.resume()
    run.wait_for(lambda: len(run.pids(MODULE)) > 0)
    run.process.kill()
    run.process.wait(10)
    assert run.left_over() == []


def test_it_goes_on_to_its_end_and_leaves_everything_behind(run: Run, tiny_model_dir: Path) -> None:
    last = len(run.steps()) + MORE_STEPS
    run.resume(f"train.steps={last}")
    assert run.process.wait(300) == 0, run.output
    lines = read(run.path / "metrics.jsonl")
    steps = [line for line in lines if line.kind == "step"]
    assert [line.step for line in steps] == list(range(1, last + 1))
    assert all(0 <= line.values["learner/lag_max"] <= 2 for line in steps)
    assert all(line.values["learner/grad_norm"] > 0 for line in steps)
    assert all(line.values.get("learner/parity_max_abs", 0) < 1e-4 for line in steps)
    assert all(line.values["engine/parity_max_abs"] < 1e-4 for line in steps)
    assert all(0 <= line.values["engine/parity_kl"] < 1e-6 for line in steps)
    assert all(line.values["engine/update_bytes_per_s"] > 0 for line in steps)
    assert [line.step for line in lines if line.kind == "eval"] == sorted({*range(0, last + 1, 2), last})
    folder = RunFolder.open(run.path)
    assert folder.trajectory_steps() == list(range(1, last + 1))
    groups = folder.read_trajectories(last)
    versions = {v for group in groups for t in group.trajectories for v in t.policy_versions() if v >= 0}
    assert versions <= {last - 3, last - 2, last - 1}
    assert "async overlap" in run.output
    assert "<html" in folder.report.read_text()[:200]
    assert _tensors_differ(tiny_model_dir, folder.checkpoints / "final")
    assert run.left_over() == []


def test_nothing_was_lost_or_made_twice(run: Run) -> None:
    assert judge(run.path, configs.load(RunFolder.open(run.path).config)) == []


def _tensors_differ(first: Path, second: Path) -> bool:
    from safetensors.torch import load_file

    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert ours.keys() == theirs.keys()
    return any(bool((ours[name] != theirs[name]).any()) for name in ours)
