"""Evaluations beside training, and of what a run exported, with the real vLLM and the real learner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl.config import load
from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from agentrl.training.model_folder import Origin, write_origin
from tests.agentrl.view.test_report import Page
from tests.conftest import VLLMServer
from tests.device import engine_settings
from tests.e2e.test_black_box import agentrl, shared, write_config

__all__ = ["shared"]
pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_spare_engine_measures_versions_while_training_goes_on(
    tmp_path: Path, tiny_model_dir: Path, shared: VLLMServer, num_workers: int
) -> None:
    engine = engine_settings(url=shared.url, max_num_seqs=16)
    measuring = {"num_tasks": 2, "samples_per_task": 2, "every": 1, "engines": 1}
    config = write_config(tmp_path, "Even", tiny_model_dir, engine=engine, eval=measuring)
    done = agentrl("train", config, f"rollout.workers={num_workers}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder.open(tmp_path / "runs" / "black-box")
    lines = read(run.metrics)
    measured = {line.step for line in lines if line.kind == "eval"}
    skipped = {line.step for line in lines if "eval/skipped" in line.values}
    assert measured | skipped == {0, 1, 2} and measured >= {0, 2} and not measured & skipped
    for step in measured:
        for group in run.read_trajectories(step, kind="eval"):
            spans = [s for one in group.trajectories for turn in one.turns for s in turn.completion.version_spans]
            assert {span.version for span in spans} == {step}
    assert (run.logs / "eval-engine.log").exists() and not (run.logs / "engine.log").exists()
    assert not (run.checkpoints / "evaluated").exists()


def test_what_a_run_exported_is_measured_and_drawn(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = write_config(tmp_path, "Even", tiny_model_dir, eval={"num_tasks": 2, "samples_per_task": 2})
    run = RunFolder.create(tmp_path / "runs", "black-box", config=load(path))
    shutil.copytree(tiny_model_dir, run.checkpoints / "step_5")
    write_origin(run.checkpoints / "step_5", Origin(run="black-box", version=5))
    done = agentrl("eval", run.path, "--checkpoints")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = read(run.metrics)
    assert (line.kind, line.step, line.values["eval/num_tasks"]) == ("eval", 5, 2.0)
    spans = [
        span
        for group in run.read_trajectories(5, kind="eval")
        for one in group.trajectories
        for turn in one.turns
        for span in turn.completion.version_spans
    ]
    assert {span.version for span in spans} == {5}
    (drawn,) = Page(run.report.read_text()).summary()["held_out"]
    assert drawn["columns"]["step"] == [5] and drawn["columns"]["eval/avg_at_n"] == [line.values["eval/avg_at_n"]]
