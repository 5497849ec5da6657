"""Who the learner is: one process at a time, and another one when that died. Knows nothing of batches and weights.

A process that was restarted stands at an older version than the run. It is let in only when the run's loop has begun
anew, from the journal, with a seat for it; the process that it replaced is turned away from then on.
"""

from __future__ import annotations

import asyncio

from agentrl.engine.metered import MeteredEngine
from agentrl.errors import LearnerReplaced
from agentrl.train.learner_seat import LearnerSeat


class LearnerDoor:
    """Between the HTTP routes and the seat of the learner that is there now."""

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Condition()
        self._seat: LearnerSeat | None = None
        self._sitting: str | None = None
        self._waiting: str | None = None
        self._gone: set[str] = set()
        self._is_shut = False

    @property
    def is_done(self) -> bool:
        """Whether the learner has nothing left to do: before that, its end is a death."""
        return self._seat is not None and self._seat.is_done

    async def open(self) -> LearnerSeat:
        """A new seat, for the learner that waits, or that comes."""
        async with self._changed:
            if self._sitting is not None:
                self._gone.add(self._sitting)
            self._seat, self._sitting = LearnerSeat(self._engine), None
            self._changed.notify_all()
            return self._seat

    async def replaced(self) -> None:
        """Wait until another learner wants the seat, then raise LearnerReplaced."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting is not None)
        raise LearnerReplaced("the learner was restarted")

    async def shut(self) -> None:
        """The run has ended: whoever waits is sent away."""
        async with self._changed:
            self._is_shut = True
            self._changed.notify_all()
        if self._seat is not None:
            await self._seat.leave()

    async def seat_of(self, learner_id: str) -> LearnerSeat:
        """The seat of this process, once it is its own. Raises LearnerReplaced for one whose time is over."""
        async with self._changed:
            while learner_id not in self._gone and not self._is_shut:
                if self._seat is not None and self._sitting in (None, learner_id):
                    self._sitting, self._waiting = learner_id, None
                    return self._seat
                self._waiting = learner_id
                self._changed.notify_all()
                await self._changed.wait()
        raise LearnerReplaced("the run has ended" if self._is_shut else "another learner has taken over this run")
