"""Checks from a finished run's folder that it lost, repeated or changed nothing. Starts and reads no processes.

Each `check_*` yields one sentence for each thing that is wrong.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.buffer.journal import GroupState
from agentrl.config import Config
from agentrl.report.metrics import MetricsLine, read
from agentrl.run_folder import RunFolder

ENDED = frozenset(
    {
        GroupState.TRAINED,
        GroupState.READY,  # finished, but the run needed no more steps
        GroupState.CANCELLED,
        GroupState.DROPPED_STALE,
        GroupState.DROPPED_ZERO_VARIANCE,
        GroupState.FAILED,
        GroupState.RESTARTED,
    }
)
MAX_Z = 4.0  # a difference of means of more standard errors is not chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """One group's row in the journal."""

    group_id: int
    task_id: str
    state: GroupState
    step: int | None
    reason: str | None = None


def fates(journal: Path) -> list[Fate]:
    """The rows of all groups, ordered by id; empty if the run never began."""
    if not journal.exists():
        return []
    with closing(sqlite3.connect(journal)) as db:
        rows = db.execute("SELECT group_id, task_id, state, step, reason FROM groups ORDER BY group_id").fetchall()
    return [
        Fate(group_id=i, task_id=task, state=GroupState(state), step=step, reason=reason)
        for i, task, state, step, reason in rows
    ]


def judge(path: Path, config: Config) -> list[str]:
    """Run every check on a run that reached its last step."""
    folder = RunFolder.open(path)
    found = fates(folder.journal)
    steps, per_step = config.train.steps, config.rollout.groups_per_step
    return [
        *check_fates(found, num_steps=steps, groups_per_step=per_step),
        *check_metrics(read_steps(folder), found, num_steps=steps),
        *check_trajectories(folder, found, num_steps=steps, config=config),
        *check_final_weights(folder, step=steps),
    ]


def check_fates(found: Sequence[Fate], *, num_steps: int, groups_per_step: int) -> Iterator[str]:
    """Every group is in one final state, every step has all its groups, and every task was used once."""
    if [fate.group_id for fate in found] != list(range(len(found))):
        yield f"group ids are not 0..{len(found) - 1}: {[fate.group_id for fate in found]}"
    for fate in found:
        if fate.state not in ENDED:
            yield f"group {fate.group_id} has not ended: {fate.state}"
        if (fate.state is GroupState.TRAINED) != (fate.step is not None):
            yield f"group {fate.group_id} is {fate.state} and has step {fate.step}"
    per_step = Counter(fate.step for fate in found if fate.step is not None)
    if per_step != dict.fromkeys(range(1, num_steps + 1), groups_per_step):
        yield f"groups by step: {dict(per_step)}"
    if twice := [task for task, number in Counter(fate.task_id for fate in found).items() if number > 1]:
        yield f"tasks asked more than once: {twice}"
    rows = {f"train-{i}" for i in range(len(found))}
    if missing := rows - {fate.task_id for fate in found}:
        yield f"rows passed over: {sorted(missing)}"


def read_steps(folder: RunFolder) -> list[MetricsLine]:
    """The lines of metrics.jsonl of kind `step`."""
    return [line for line in read(folder.metrics) if line.kind == "step"]


def check_metrics(steps: Sequence[MetricsLine], found: Sequence[Fate], *, num_steps: int) -> Iterator[str]:
    """Each step is there once and in order, its ledger balances, and the last ledger agrees with the journal."""
    if [line.step for line in steps] != list(range(1, num_steps + 1)):
        yield f"metrics.jsonl has the steps {[line.step for line in steps]}"
    for line in steps:
        ledger = {name.removeprefix("ledger/"): n for name, n in line.values.items() if name.startswith("ledger/")}
        if not ledger or ledger.pop("issued") != sum(ledger.values()):
            yield f"the ledger of step {line.step} does not balance: {ledger}"
    trained = sum(fate.state is GroupState.TRAINED for fate in found)
    if steps and steps[-1].values["ledger/trained"] != trained:
        yield f"the ledger says {steps[-1].values['ledger/trained']:g} groups were trained, the journal {trained}"


def check_trajectories(folder: RunFolder, found: Sequence[Fate], *, num_steps: int, config: Config) -> Iterator[str]:
    """The trained groups are those of the journal, with all their members, and none is older than max_lag allows."""
    if folder.trajectory_steps() != list(range(1, num_steps + 1)):
        yield f"trajectories/ has the steps {folder.trajectory_steps()}"
        return
    for step in range(1, num_steps + 1):
        groups = folder.read_trajectories(step)
        expected = [(fate.group_id, fate.task_id) for fate in found if fate.step == step]
        if [(group.group_id, group.task.id) for group in groups] != expected:
            yield f"step {step} trained {[group.group_id for group in groups]}, the journal says {expected}"
        for group in groups:
            if len(group.trajectories) != config.rollout.group_size:
                yield f"group {group.group_id} has {len(group.trajectories)} trajectories"
            lags = {step - 1 - trajectory.policy_version for trajectory in group.trajectories}
            if not lags <= set(range(config.rollout.lag_bound + 1)):
                yield f"group {group.group_id} of step {step} has lags {sorted(lags)}"


def check_final_weights(folder: RunFolder, *, step: int) -> Iterator[str]:
    """The exported model is bit-identical to the learner's last checkpoint."""
    import torch

    exported = tensors(folder.checkpoints / "final")
    state: dict[str, Any] = torch.load(
        folder.states / f"v{step}" / "deepspeed" / "mp_rank_00_model_states.pt", weights_only=False
    )["module"]
    state = {
        name: tensor for name, tensor in state.items() if name in exported
    }  # the checkpoint holds a tied head twice
    if exported.keys() != state.keys():
        yield f"checkpoints/final and v{step} have other tensors: {sorted(exported.keys() ^ state.keys())}"
    for name in exported.keys() & state.keys():
        if not torch.equal(exported[name], state[name]):
            yield f"checkpoints/final is not v{step}: {name} differs"


def different_weights(first: RunFolder, second: RunFolder) -> list[str]:
    """Names of the final tensors that are not bit-identical."""
    import torch

    ours, theirs = tensors(first.checkpoints / "final"), tensors(second.checkpoints / "final")
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def tensors(model: Path) -> dict[str, Any]:
    """The tensors of a folder in Hugging Face layout."""
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def trained_lengths(folder: RunFolder) -> dict[int, float]:
    """Mean number of action tokens per episode for each trained group, by group id."""
    return {
        group.group_id: sum(t.num_action_tokens for t in group.trajectories) / len(group.trajectories)
        for step in folder.trajectory_steps()
        for group in folder.read_trajectories(step)
    }


def standard_errors_apart(first: Sequence[float], second: Sequence[float]) -> float:
    """(mean of `first` - mean of `second`) / its standard error: Welch's t. Above MAX_Z it is a bias."""
    return (_mean(first) - _mean(second)) / math.sqrt(_variance(first) / len(first) + _variance(second) / len(second))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
