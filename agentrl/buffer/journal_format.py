"""How the journal stores records, as MessagePack, and which formats of its file are read.

Independent of SQLite and of what the records mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agentrl.report.statistics import EvalResult
from agentrl.run_folder import old_episode_id, to_episodes
from agentrl.types import Task, Trajectory, TrajectoryGroup

T = TypeVar("T")

FORMAT = 5
OLD_FORMATS = (2, 3, 4)
"""Formats that this version still reads; its first write marks such a file as FORMAT.

2: groups were stored as trajectories, without episodes. 3: no group could be RESTARTED.
4: a version had one evaluation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When a step was made, in Unix seconds by the orchestrator's clock. Example: `journal.step_times()[3].held_at`."""

    waited_at: float  # for its batch, from then on
    taken_at: float  # the batch was complete
    stepped_at: float  # the learner had made the step
    held_at: float  # every engine held its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """The orchestrator's own state after a step. Example: `StepState(ess_guard=guard.state_dict(), train_s=60.0)`."""

    ess_guard: dict[str, float]  # EssGuard.state_dict
    train_s: float  # seconds spent training by then
    times: StepTimes | None = None  # None in old files


def encode(record: object) -> bytes:
    """The record as bytes. Example: `encode(Task(id="a", prompt="?"))`."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, record_type: type[T]) -> T:
    """The record of `encode`. Raises msgspec.ValidationError for one of another type."""
    return msgspec.msgpack.decode(data, type=record_type)


def decode_group(payload: bytes) -> TrajectoryGroup:
    """A group of any format that is read. Raises msgspec.ValidationError for anything else."""
    try:
        return decode(payload, TrajectoryGroup)
    except msgspec.ValidationError:
        old = decode(payload, _FlatGroup)
    episodes = to_episodes((old_episode_id(trajectory.id), trajectory) for trajectory in old.trajectories)
    return TrajectoryGroup(group_id=old.group_id, task=old.task, episodes=episodes)


def decode_evaluations(result: bytes) -> tuple[EvalResult, ...]:
    """The evaluations of one version, of any format. Raises msgspec.ValidationError for anything else."""
    try:
        return decode(result, tuple[EvalResult, ...])
    except msgspec.ValidationError:
        return (decode(result, EvalResult),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatGroup:
    """A group as format 2 stored it."""

    group_id: int
    task: Task
    trajectories: tuple[Trajectory, ...]
