"""Evaluates a policy: plays a fixed list of tasks with the code of training. Nothing is trained on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import raise_first
from agentrl.report.statistics import EvalResult, summarize
from agentrl.types import Task, TrajectoryGroup

MakeGroup = Callable[[int, Task], Awaitable[TrajectoryGroup]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result, and the episodes that it summarizes.

    Example:
        evaluation = await evaluate(tasks, make_group=play, policy_version=0, max_concurrent_groups=4)
        evaluation.result.avg
    """

    result: EvalResult
    groups: tuple[TrajectoryGroup, ...]


async def evaluate(
    tasks: Sequence[Task],
    *,
    make_group: MakeGroup,
    policy_version: int | None,
    max_concurrent_groups: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Play every task and compute the statistics.

    Args:
        policy_version: None for the oldest that the engine reported with a token; 0 where it reports none.
        make_group: (group_id, task) -> a finished group. Its InfraError ends the evaluation: a mean over only the tasks
            that worked would be wrong.
        progress: called with (tasks done, number of tasks).
    """
    gate = asyncio.Semaphore(max_concurrent_groups)
    num_done = 0

    async def one(index: int, task: Task) -> TrajectoryGroup:
        nonlocal num_done
        async with gate:
            group = await make_group(index, task)
        num_done += 1
        progress(num_done, len(tasks))
        return group

    try:
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(one(index, task)) for index, task in enumerate(tasks)]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    groups = tuple(job.result() for job in jobs)
    version = _oldest_version(groups) if policy_version is None else policy_version
    return Evaluation(result=summarize(groups, policy_version=version), groups=groups)


def _oldest_version(groups: Sequence[TrajectoryGroup]) -> int:
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    return min((span.version for turn in turns for span in turn.completion.version_spans), default=0)
