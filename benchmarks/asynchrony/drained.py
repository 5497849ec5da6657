"""Asynchronous training without partial rollouts: new weights wait until the episodes in flight have ended.

Meanwhile no group begins, so no episode, and no group, is of two versions of the weights. The price is that the engine
runs empty before every update. Wraps the engine and the playing of groups that a run is made of; the run itself is as
before.
"""

from __future__ import annotations

import asyncio

from agentrl.engine.base import Engine, TrainableEngine, WeightUpdate
from agentrl.engine.metered import MeteredEngine
from agentrl.errors import EngineError
from agentrl.rollouts.group import PlayGroup
from agentrl.run_folder import EpisodeKind
from agentrl.types import Task, TrajectoryGroup, WeightsRef


class Drained(MeteredEngine):
    """An engine whose weights change only while no group is played.

    Args:
        play_group: how a group is played; `Drained.play_group` takes its place.
        within_s: how long an update waits for the groups in flight; less than the learner waits for its publication.

    Example:
        drained = Drained(engine, player.play_group)
        Orchestrator(config, engine=drained, rollout_parts=RolloutParts(play_group=drained.play_group, ...), ...)
    """

    def __init__(self, engine: TrainableEngine, play_group: PlayGroup[Engine], *, within_s: float = 240.0) -> None:
        super().__init__(engine)
        self._play_group = play_group
        self._within_s = within_s
        self._updating = asyncio.Lock()
        self._num_playing = 0
        self._none_plays, self._may_begin = asyncio.Event(), asyncio.Event()
        self._none_plays.set()
        self._may_begin.set()
        self.is_draining = False
        """Whether an update waits for the groups in flight."""

    async def play_group(self, engine: Engine, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        """See PlayGroup. Begins when no update waits or runs."""
        while not self._may_begin.is_set():
            await self._may_begin.wait()
        self._num_playing += 1
        self._none_plays.clear()
        try:
            return await self._play_group(engine, group_id, task, kind=kind)
        finally:
            self._num_playing -= 1
            if not self._num_playing:
                self._none_plays.set()

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """See TrainableEngine. Raises EngineError where the groups in flight do not end in time."""
        async with self._updating:
            self._may_begin.clear()
            try:
                await self._drain()
                return await super().update_weights(ref)
            finally:
                self._may_begin.set()

    async def _drain(self) -> None:
        self.is_draining = True
        try:
            async with asyncio.timeout(self._within_s):
                await self._none_plays.wait()
        except TimeoutError:
            raise EngineError(
                f"{self._num_playing} groups were still played {self._within_s:g} s after an update began to wait for "
                "them: set a shorter rollout.episode_timeout_s, or a longer within_s"
            ) from None
        finally:
            self.is_draining = False
