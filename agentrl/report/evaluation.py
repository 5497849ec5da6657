"""Evaluates a policy: plays fixed lists of tasks with the code of training. Nothing is trained on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic

from agentrl.errors import WeightSyncError, raise_first
from agentrl.report.statistics import EvalResult, summarize
from agentrl.rollouts.group import ModelT, PlayGroup
from agentrl.types import Task, TrajectoryGroup

MakeGroup = Callable[[int, Task], Awaitable[TrajectoryGroup]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet(Generic[ModelT]):
    """Tasks that are only measured, the same every time, and who plays them.

    Example:
        HeldOutSet(tasks=tasks, num_plays=4, play_group=player.play_group)
    """

    name: str = ""  # of `eval.sets`; empty without them
    tasks: Sequence[Task]
    num_plays: int  # episodes of each task
    play_group: PlayGroup[ModelT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result, and the episodes that it summarizes.

    Example:
        evaluation = await evaluate(tasks, make_group=play, policy_version=0, max_concurrent_groups=4)
        evaluation.result.avg
    """

    result: EvalResult
    groups: tuple[TrajectoryGroup, ...]
    others: tuple[Evaluation, ...] = ()  # of the sets after the first, where `eval.sets` has several


async def evaluate_sets(
    sets: Sequence[HeldOutSet[ModelT]],
    model: ModelT,
    *,
    policy_version: int | None,
    max_concurrent_episodes: int,
    finished: Callable[[Evaluation], Awaitable[None]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Evaluation]:
    """Evaluate several sets at once: the first tasks of one begin while the last of the one before it are played.

    Args:
        finished: called with each set's evaluation as soon as its last task is done.
        progress: called with (tasks done, number of tasks), of all sets together.

    The other arguments and the errors are those of `evaluate`.
    """
    room = _Room(max_concurrent_episodes)
    num_done, total = 0, sum(len(held_out.tasks) for held_out in sets)

    async def one(held_out: HeldOutSet[ModelT]) -> Evaluation:
        async def make_group(index: int, task: Task) -> TrajectoryGroup:
            async with room.taken(held_out.num_plays):
                return await held_out.play_group(model, index, task, kind="eval")

        def advance(done: int, of: int) -> None:
            nonlocal num_done
            num_done += 1
            progress(num_done, total)

        measured = await evaluate(
            held_out.tasks,
            make_group=make_group,
            policy_version=policy_version,
            max_concurrent_groups=len(held_out.tasks),
            progress=advance,
            set_name=held_out.name,
        )
        if finished is not None:
            await finished(measured)
        return measured

    try:
        async with asyncio.TaskGroup() as running:
            jobs = [running.create_task(one(held_out), name=f"evaluation {held_out.name}") for held_out in sets]
    except BaseExceptionGroup as errors:
        raise_first(errors)
    return [job.result() for job in jobs]


async def evaluate(
    tasks: Sequence[Task],
    *,
    make_group: MakeGroup,
    policy_version: int | None,
    max_concurrent_groups: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    set_name: str = "",
) -> Evaluation:
    """Play every task and compute the statistics.

    Args:
        policy_version: that every token must come from. None: whatever the engine reports; where that changes
            meanwhile, the result names the oldest and the newest. 0 where it reports none.
        make_group: (group_id, task) -> a finished group. Its InfraError ends the evaluation: a mean over only the tasks
            that worked would be wrong.
        progress: called with (tasks done, number of tasks).

    Raises WeightSyncError where a token comes from another version than `policy_version`.
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
    versions = _versions(groups)
    if policy_version is not None and (others := versions - {policy_version}):
        raise WeightSyncError(
            f"the evaluation of version {policy_version} has tokens of version {min(others)}: an engine did not hold "
            "the weights that were measured"
        )
    oldest = min(versions, default=0) if policy_version is None else policy_version
    result = replace(summarize(groups, policy_version=oldest), set_name=set_name)
    newest = max(versions, default=oldest)
    return Evaluation(result=replace(result, newest_version=newest if newest != oldest else None), groups=groups)


class _Room:
    """A number of episodes that may be played at once. Who waits longest is next."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._free = asyncio.Semaphore(num_episodes)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, num_episodes: int) -> AsyncIterator[None]:
        """Room for a group, which has at most all of it."""
        num_taken = 0
        try:
            async with self._turn:
                while num_taken < min(num_episodes, self._num_episodes):
                    await self._free.acquire()
                    num_taken += 1
            yield
        finally:
            for _ in range(num_taken):
                self._free.release()


def _versions(groups: Sequence[TrajectoryGroup]) -> set[int]:
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    return {span.version for turn in turns for span in turn.completion.version_spans}
