"""Whole runs with `place: ray` on a real cluster of several raylets: the same result as without, and nodes that go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.supervision.orphan_guard import MARK_VARIABLE, processes
from tests.agentrl.supervision.test_process_trees import all_ended
from tests.agentrl.supervision.test_ray_place import MARK, cluster, node_arguments, node_of, ray
from tests.e2e.kill_judge import different_weights, judge
from tests.e2e.kill_model import make_model_folder
from tests.e2e.kill_run import KillRun
from tests.e2e.kill_soak import SYNCHRONOUS

__all__ = ["cluster"]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]

KINDS = ("engine", "learner", "sandbox", "rollout_worker")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def nodes(cluster: Any) -> Iterator[dict[str, list[Any]]]:
    """Two nodes for each kind of part."""
    made = {
        kind: [cluster.add_node(**node_arguments(num_cpus=1, resources={kind: 1})) for _ in range(2)] for kind in KINDS
    }
    ray.init(address=cluster.address, log_to_driver=False)
    yield made
    ray.shutdown()


def on_ray(cluster: Any) -> dict[str, Any]:
    bundles = {kind: {kind: 1, "CPU": 1} for kind in KINDS}
    return {"place": "ray", "ray.address": cluster.address, "ray.bundles": bundles}


@pytest.mark.usefixtures("nodes")
def test_three_steps_through_ray_equal_three_without(cluster: Any, model: Path, tmp_path: Path) -> None:
    settings = SYNCHRONOUS | {"train.steps": 3}
    runs = [
        KillRun(folder=tmp_path / name, model=model, seed=0, settings=settings | place)
        for name, place in (("local", {}), ("ray", on_ray(cluster)))
    ]
    for run in runs:
        run.go()
        assert judge(run.run.path, run.config) == [], run.report("wrong")
    assert different_weights(*(run.run for run in runs)) == []


@pytest.mark.parametrize(
    ("kinds", "settings"),
    [(("engine", "learner"), {}), (("sandbox", "rollout_worker"), {"rollout.workers": 1})],
    ids=["engine-learner", "sandbox-worker"],
)
def test_a_run_survives_the_loss_of_nodes_under_its_parts(
    cluster: Any,
    nodes: dict[str, list[Any]],
    model: Path,
    tmp_path: Path,
    kinds: tuple[str, ...],
    settings: dict[str, Any],
) -> None:
    settings = SYNCHRONOUS | {"train.steps": 12} | on_ray(cluster) | settings
    run = KillRun(folder=tmp_path / "run", model=model, seed=0, settings=settings)
    failures: list[BaseException] = []

    def go() -> None:
        try:
            run.go()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    for kind in kinds:
        before = run.last_step()
        until(lambda before=before: run.last_step() > before or not thread.is_alive())
        cluster.remove_node(node_of(nodes[kind], kind), allow_graceful=False)
    thread.join(400)
    assert failures == [] and not thread.is_alive()
    assert judge(run.run.path, run.config) == [], run.report("wrong")
    log = (run.folder / "out.log").read_text()
    assert log.count("its node went away") == len(kinds)


@pytest.mark.usefixtures("nodes")
def test_two_hundred_groups_are_in_flight_on_one_worker(cluster: Any, model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rollout.groups_per_step": 200, "rollout.group_size": 2, "engine.max_num_seqs": 64}
    settings |= {"train.steps": 2, "rollout.max_lag": 0, "rollout.workers": 1} | on_ray(cluster)
    run, most = KillRun(folder=tmp_path / "run", model=model, seed=0, settings=settings), 0
    thread = threading.Thread(target=run.go)
    thread.start()
    while thread.is_alive():
        most = max(most, run.num_in_flight())
        time.sleep(0.05)
    assert most >= 200
    assert judge(run.run.path, run.config) == [], run.report("wrong")


@pytest.mark.usefixtures("nodes")
def test_ten_seconds_after_the_command_is_killed_no_process_of_a_part_is_left(
    cluster: Any, model: Path, tmp_path: Path
) -> None:
    settings = {"train.steps": 500, "rollout.workers": 1} | on_ray(cluster)
    run = KillRun(folder=tmp_path / "run", model=model, seed=0, settings=settings)
    command = [sys.executable, "-m", "agentrl", "train", str(run.folder / "config.yaml")]
    command += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    with subprocess.Popen(command) as train:
        try:
            until(lambda: run.last_step() > 0 or train.poll() is not None)
            pids = parts_of_this_cluster()
        finally:
            train.kill()
    said = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists())
    assert all(module in said for module in (b"vllm", b"trainer", b"sandbox", b"rollout-worker"))
    assert all_ended(pids, 10.0)


def parts_of_this_cluster() -> list[int]:
    """The sessions of its parts. vLLM's processes write their names over their environment, so marks are not enough."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    guards = set()
    for pid, _, session in processes():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if mark in words and any(word.startswith(f"{MARK_VARIABLE}=".encode()) for word in words):
                guards.add(session)
    return [pid for pid, _, session in processes() if session in guards]


def until(holds: Callable[[], bool], within_s: float = 200) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
