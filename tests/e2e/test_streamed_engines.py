"""`agentrl train` with two engines that take streamed weights in one group: one is killed, and the run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.engine.vllm_command import MODULE
from tests.device import cpu_engine_only
from tests.e2e.test_train import Run, _read

pytestmark = [
    cpu_engine_only("gloo is for CPUs"),
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.timeout(500),
]


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model_dir)
    yield run
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)


def serving(run: Run) -> list[float]:
    """Engines that served, at each step."""
    return [line.values["engine/num_serving"] for line in run.steps()]


def test_one_of_two_engines_is_killed_and_the_other_takes_weights_in_a_new_group(run: Run) -> None:
    engines = ("engine.replicas=2", "engine.weight_transfer=gloo")
    # A task that is solved, or an evaluation after each second step, leaves too few steps before the engine returns.
    run._train(str(run.config), *engines, "learner.lr=1e-9", "eval.every=0")
    run.wait_for(lambda: len(serving(run)) >= 2)
    servers = [pid for pid in run.pids(MODULE) if "guard.py" not in _read(pid, "cmdline")]
    os.killpg(os.getpgid(servers[0]), signal.SIGKILL)
    run.wait_for(lambda: serving(run).count(1.0) >= 3)  # the other takes each version in a group without it
    steps = run.steps()
    assert [line.step for line in steps] == list(range(1, len(steps) + 1))
    assert all(line.values["ledger/failed"] == 0 for line in steps)
    assert all(line.values["engine/parity_max_abs"] < 1e-4 for line in steps)
    assert steps[-1].values["engine/ejections"] == 1
    assert "the learner was restarted" not in run.output
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output
    assert run.left_over() == []
