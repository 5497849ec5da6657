"""The learner as the conductor sees it: offer it a batch, get a step, get weights. Knows no buffer and no rollouts.

A repeated call of the learner is answered as the first one was, so a lost reply costs nothing. Which process speaks is
learner_door.py's to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.engine.metered import MeteredEngine
from agentrl.engine.weight_updates import WeightUpdate
from agentrl.errors import EngineError, LearnerError, LearnerReplaced, WeightsWanted
from agentrl.train.learner_api import RunOver
from agentrl.types import Batch, StepOutput, TransferInit, WeightsRef

T = TypeVar("T")


class LearnerSeat:
    """Two sides of one table; also measures how much of the learner's working time the engine spent generating."""

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Condition()
        self._batch: Batch | None = None
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._refs: asyncio.Queue[WeightsRef | EngineError] = asyncio.Queue()
        self._published_version = -1
        self._over = False
        self._finished = asyncio.Event()
        self._has_left = False
        self._handed_out: tuple[float, float] | None = None  # clock, engine-busy seconds
        self._work_s = 0.0
        self._overlap_s = 0.0
        self.made_version = -1
        """Newest version that the learner has made, as far as it said so."""
        self.last_update: WeightUpdate | None = None
        """What the last weight update took."""

    # The conductor's side.

    async def train(self, batch: Batch, *, within_s: float) -> StepOutput:
        """Offer `batch` and wait for its step. Raises LearnerError past the deadline."""
        async with self._changed:
            self._batch = batch
            self._handed_out = None
            self._changed.notify_all()
        return await _within(self._outputs.get(), within_s, f"step {batch.policy_version + 1}")

    async def weights(self, *, within_s: float) -> WeightsRef:
        """Wait until the next version is in every engine. Raises LearnerError past the deadline, or what broke."""
        ref = await _within(self._refs.get(), within_s, "its weights")
        if isinstance(ref, EngineError):
            raise ref
        return ref

    async def finish(self) -> None:
        """Tell the learner that there is no further batch."""
        async with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether the learner has nothing left to do."""
        return self._finished.is_set()

    async def exported(self, *, within_s: float) -> None:
        """Wait until the learner, told that it is over, has exported its weights. Raises LearnerError."""
        await _within(self._finished.wait(), within_s, "its last export")

    async def leave(self) -> None:
        """The run has ended, however: a learner that waits is told so, and exports nothing."""
        self._has_left = True
        await self.finish()

    @property
    def overlap(self) -> float:
        """Share of the learner's working time during which the engine generated."""
        return self._overlap_s / self._work_s if self._work_s else 0.0

    # The learner's side: see batch_server.LearnerPort.

    async def next_batch(self, policy_version: int) -> Batch:
        """Wait for the batch to consume at `policy_version`. Raises RunOver, WeightsWanted, LearnerReplaced."""
        if self._engine.wants_weights:
            raise WeightsWanted
        async with self._changed:
            with self._engine.progress.waiting("learner", on="conductor", what="a batch", moves=False):
                await self._changed.wait_for(
                    lambda: self._over or (self._batch is not None and self._batch.policy_version == policy_version)
                )
            if self._has_left:
                raise LearnerReplaced("the run has ended")
            if self._over or self._batch is None:
                raise RunOver
            self._handed_out = self._handed_out or (time.monotonic(), self._engine.busy.seconds)
            return self._batch

    async def step_done(self, output: StepOutput) -> None:
        """A step was made; a repeated report is ignored."""
        if self._batch is None or output.policy_version != self._batch.policy_version + 1:
            return
        if self._handed_out is not None:
            since, busy_s = self._handed_out
            self._work_s += time.monotonic() - since
            self._overlap_s += self._engine.busy.seconds - busy_s
        self._batch = None
        self.made_version = output.policy_version
        self._outputs.put_nowait(output)

    async def transfer_opened(self, init: TransferInit) -> None:
        """Let the engine join the learner's group. Raises EngineError."""
        await self._engine.init_transfer(init)

    async def weights_published(self, ref: WeightsRef) -> None:
        """Put the weights into the engine. Raises EngineError; WeightsWanted where it was restarted meanwhile."""
        is_new = ref.policy_version > self._published_version
        if not is_new and not self._engine.wants_weights:
            return
        self.last_update = await self._engine.update_weights(ref)
        if is_new:
            self._published_version = ref.policy_version
            self._refs.put_nowait(ref)

    async def engine_failed(self, error: EngineError) -> None:
        """It did not take the weights: that ends the run, and reaches the conductor as it is."""
        self._refs.put_nowait(error)

    async def finished(self) -> None:
        """The final weights lie in the run's folder."""
        self._finished.set()


async def _within(waiting: Awaitable[T], seconds: float, what: str) -> T:
    try:
        async with asyncio.timeout(seconds):  # asyncio.wait_for can swallow a cancellation
            return await waiting
    except TimeoutError as error:
        raise LearnerError(f"the learner did not deliver {what} within {seconds:g} s; see logs/learner.log") from error
