"""`agentrl cluster render slurm`: Slurm runs the script on two machines, with real vLLM and DeepSpeed, and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from agentrl.report.metrics import read
from agentrl.run_folder import RunFolder
from tests import machines, slurm
from tests.device import engine_settings
from tests.e2e.kill_model import make_model_folder
from tests.machines import without_rays
from tests.slurm import Slurm, slurm_cluster

REASON = slurm.why_not() or machines.why_not()
pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    env = {**without_rays(os.environ), "PYTHONPATH": str(ROOT)}
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), cpus=2, env=env) as made:
        yield made


def test_a_rendered_script_trains_on_two_machines_and_submitted_again_continues(cluster: Slurm, tmp_path: Path) -> None:
    script, run = rendered(tmp_path), RunFolder(path=tmp_path / "runs" / "job")
    number = cluster.run(["sbatch", "--parsable", str(script)], cwd=tmp_path).stdout.strip()
    until(lambda: run.metrics.exists() and len(steps(run)) > 0)
    cluster.run(["scancel", number], cwd=tmp_path)
    until(lambda: not cluster.run(["squeue", "--noheader"], cwd=tmp_path).stdout)
    before = steps(run)
    assert 0 < len(before) < NUM_STEPS
    again = cluster.run(["sbatch", "--wait", str(script)], cwd=tmp_path, timeout=500)
    log = max(tmp_path.glob("job-*.log")).read_text()
    assert again.returncode == 0, log
    assert "job continues" in log
    assert steps(run) == list(range(1, NUM_STEPS + 1))
    assert not list((tmp_path / "runs").glob(".ray-token*")), "the token is gone with the job"


def rendered(folder: Path) -> Path:
    """The script of a small run whose parts need two nodes of two CPUs."""
    config = folder / "config.yaml"
    settings = {
        "name": "job",
        "out_dir": str(folder / "runs"),
        "env": {"target": f"{Path(__file__).parent / 'kill_env.py'}:EvenTotal"},
        "model": {"path": str(make_model_folder(folder / "model"))},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_context": 384, "max_turn_tokens": 32},
        "engine": engine_settings(max_num_seqs=16),
        "learner": {"lr": 1e-5, "checkpoint_every": 1},
        "eval": {"num_tasks": 2, "samples_per_task": 1},
        "train": {"steps": NUM_STEPS},
    }
    config.write_text(json.dumps(settings))
    out = folder / "job.sh"
    words = ["cluster", "render", "slurm", str(config), "--cpus-per-node", "2", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "agentrl", *words], cwd=ROOT, check=True)
    assert "#SBATCH --nodes=2\n" in out.read_text()
    return out


def steps(run: RunFolder) -> list[int]:
    return [line.step for line in read(run.metrics) if line.kind == "step"]


def until(holds: object, within_s: float = 400) -> None:
    assert callable(holds)
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
