"""kill -9 of any part at any moment loses, repeats and changes nothing; and the checks would detect it if it did."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.buffer.journal import GroupState, Journal
from agentrl.buffer.journal_format import StepState
from agentrl.config import Config, parse
from agentrl.report.metrics import MetricsLog
from agentrl.run_folder import RunFolder
from agentrl.testing import one_token_group, with_members
from agentrl.types import Task, TrajectoryGroup
from tests.e2e.kill_engine import OutsideEngine
from tests.e2e.kill_judge import (
    MAX_Z,
    Fate,
    check_fates,
    check_metrics,
    check_trajectories,
    different_weights,
    fates,
    judge,
    read_steps,
    standard_errors_apart,
)
from tests.e2e.kill_model import make_model_folder
from tests.e2e.kill_run import KillRun, Part, base_config
from tests.e2e.kill_soak import SYNCHRONOUS, soak

SETTINGS = SYNCHRONOUS | {"train.steps": 9}

STEPS, PER_STEP, SIZE, LAG = 3, 2, 2, 1


def group_of(group_id: int, *, version: int) -> TrajectoryGroup:
    task = Task(id=f"train-{group_id}", prompt="?")
    rewards = [float(index) for index in range(SIZE)]
    return one_token_group(group_id, task=task, versions=[version] * SIZE, rewards=rewards)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse(
        {
            "name": "run",
            "out_dir": str(tmp_path),
            "env": {"target": "unused:Unused"},
            "model": {"path": "unused"},
            "rollout": {"groups_per_step": PER_STEP, "group_size": SIZE, "max_lag": LAG},
            "train": {"steps": STEPS},
        },
        source="test",
    )


@pytest.fixture
def run(config: Config) -> RunFolder:
    """A correct run: eight groups issued, six trained, one without a gradient, one cancelled at the end."""
    folder = RunFolder.create(config.out_dir, "run", config=config)
    journal = Journal(folder.journal)
    for group_id in range(8):
        journal.issued(group_id, Task(id=f"train-{group_id}", prompt="?"), cursor=group_id + 1)
    with MetricsLog(folder) as metrics:
        for step in range(1, STEPS + 1):
            groups = [group_of(i, version=max(0, step - 2)) for i in (2 * step - 2, 2 * step - 1)]
            for group in groups:
                journal.ready(group)
            ids = [group.group_id for group in groups]
            journal.taken(ids, step=step)
            journal.trained(ids)
            journal.step_made(step, StepState(ess_guard={}, train_s=1.0), resumable_from=None)
            folder.write_trajectories(step, groups)
            metrics.log("step", step, {"ledger/issued": 8, "ledger/trained": 2 * step, "ledger/ready": 8 - 2 * step})
    journal.useless(group_of(6, version=0))
    journal.ended(7, GroupState.CANCELLED, "the run ended")
    journal.close()
    return folder


def complaints(run: RunFolder, config: Config) -> list[str]:
    found = fates(run.journal)
    return [
        *check_fates(found, num_steps=STEPS, groups_per_step=PER_STEP),
        *check_metrics(read_steps(run), found, num_steps=STEPS),
        *check_trajectories(run, found, num_steps=STEPS, config=config),
    ]


def test_a_run_as_it_should_be_has_no_complaint(run: RunFolder, config: Config) -> None:
    assert complaints(run, config) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda found: found[:3] + found[4:], "group ids are not"),
        (lambda found: [replace(found[0], state=GroupState.TRAINING), *found[1:]], "has not ended"),
        (lambda found: [replace(found[0], step=2), *found[1:]], "groups by step"),
        (lambda found: [*found[:7], replace(found[7], step=3)], "is cancelled and has step 3"),
        (lambda found: [replace(found[0], task_id="train-1"), *found[1:]], "asked more than once"),
        (lambda found: [replace(found[0], task_id="train-9"), *found[1:]], "passed over"),
    ],
    ids=["lost", "in training", "wrong step", "trained and cancelled", "asked twice", "skipped"],
)
def test_a_group_with_two_fates_or_none_is_seen(
    run: RunFolder, change: Callable[[list[Fate]], list[Fate]], complaint: str
) -> None:
    found = change(fates(run.journal))
    assert complaint in " ".join(check_fates(found, num_steps=STEPS, groups_per_step=PER_STEP))


def test_a_step_made_twice_or_a_ledger_that_does_not_balance_is_seen(run: RunFolder, config: Config) -> None:
    with MetricsLog(run) as metrics:
        metrics.log("step", STEPS, {"ledger/issued": 8, "ledger/trained": 5})
    seen = " ".join(complaints(run, config))
    assert "[1, 2, 3, 3]" in seen and "does not balance" in seen and "says 5 groups were trained" in seen


def test_old_doubled_or_torn_batches_are_seen(run: RunFolder, config: Config) -> None:
    torn = with_members(group_of(4, version=2), group_of(4, version=2).trajectories[:1])
    run.write_trajectories(3, [torn, group_of(0, version=0)])
    seen = " ".join(complaints(run, config))
    assert "step 3 trained [4, 0]" in seen and "has 1 trajectories" in seen and "has lags [2]" in seen


def test_a_bias_of_a_tenth_in_length_is_told_from_chance() -> None:
    rng = random.Random(0)
    lengths, others = ([rng.expovariate(0.1) for _ in range(4000)] for _ in range(2))
    assert abs(standard_errors_apart(lengths, others)) < 2
    assert standard_errors_apart([1.1 * length for length in lengths], others) > MAX_Z


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("kill") / "model")


@pytest.fixture
def engine(tmp_path: Path, model: Path) -> Iterator[OutsideEngine]:
    """One server for both runs: a start takes half a minute."""
    config = tmp_path / "engine.json"
    config.write_text(json.dumps(base_config(tmp_path, model)))
    engine = OutsideEngine(tmp_path, config, [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()])
    try:
        engine.wait()
        yield engine
    finally:
        engine.stop()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_kill_of_each_part_loses_nothing_and_changes_no_bit(
    tmp_path: Path, model: Path, engine: OutsideEngine
) -> None:
    """The run in peace plays its episodes in one process; in the other one, two rollout workers play them."""
    peace, killed = (
        KillRun(folder=tmp_path / name, model=model, seed=7, settings=settings, engine=engine, max_delay_s=0.5)
        for name, settings in (("peace", SETTINGS), ("killed", SETTINGS | {"rollout.workers": 2}))
    )
    peace.go()
    killed.go([Part.LEARNER, Part.WORKER, Part.SANDBOX, Part.ENGINE, Part.TRAIN])
    assert {kill.part for kill in killed.kills} == set(Part), killed.report("the run was over before the last kill")
    for run in (peace, killed):
        assert judge(run.run.path, run.config) == [], run.report("wrong")
    assert different_weights(peace.run, killed.run) == [], killed.report("not the weights of the run in peace")


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(7200)
def test_fifty_kills_lose_nothing_and_change_no_bit(tmp_path: Path, model: Path) -> None:
    seed = int(os.environ.get("AGENTRL_KILL_SEED", "0")) or random.randrange(10**6)
    result = soak(tmp_path, model, seed=seed, num_kills=50)
    assert result.complaints == [], f"{result.table}\nseed {seed}"
