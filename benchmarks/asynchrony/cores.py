"""Cores that rollouts and a learner share, in simulated time: every job gets a fair share of what it can use.

For benchmarks/asynchrony/simulation.py; runs in benchmarks/virtual_time.py's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools

TINY = 1e-9
"""Core-seconds that count as nothing: the rounding of the clock."""


class Cores:
    """Processor sharing between one learner and many rollouts.

    The learner and the rollouts together each get what they can use; where that is more than there is, half of the
    cores each, and what one of them leaves goes to the other. Rollouts share equally.

    Args:
        total: number of cores.
        learner: cores that a learner step can use.
        rollouts: cores that all rollouts together can use.
        one_rollout: cores that one rollout can use, e.g. 0.2: alone it is not faster than that.
        is_split: learner and rollouts have half of the cores each and never more.

    Example:
        await cores.roll(0.02)  # core-seconds of one turn
    """

    def __init__(self, total: float, *, learner: float, rollouts: float, one_rollout: float, is_split: bool) -> None:
        limit = total / 2 if is_split else total
        self._total = total
        self._learner_limit = min(learner, limit)
        self._rollouts_limit = min(rollouts, limit)
        self._one_rollout = one_rollout
        self._learner: tuple[float, asyncio.Future[None]] | None = None  # core-seconds left
        self._jobs: list[tuple[float, int, asyncio.Future[None]]] = []  # by the service at which they are done
        self._num_jobs = 0  # without those that were cancelled
        self._service = 0.0  # core-seconds that each rollout present has got
        self._paused = False
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self.rollout_core_s = 0.0
        """Core-seconds that rollouts used."""
        self.learner_core_s = 0.0
        """Core-seconds that the learner used."""
        self.busy_s = 0.0
        """Seconds in which some rollout computed."""
        self.learner_busy_s = 0.0
        """Seconds in which the learner computed."""

    async def roll(self, core_s: float) -> None:
        """Compute so many core-seconds of one rollout."""
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._jobs, (self._service + core_s, next(self._numbers), done))
        self._num_jobs += 1
        self._plan()
        try:
            await done
        except asyncio.CancelledError:
            self._advance()
            with contextlib.suppress(StopIteration):
                self._jobs.remove(next(job for job in self._jobs if job[2] is done))
                heapq.heapify(self._jobs)
                self._num_jobs -= 1
            self._plan()
            raise

    async def learn(self, core_s: float) -> None:
        """Compute so many core-seconds of the learner, which does one thing at a time."""
        assert self._learner is None
        self._advance()
        done = asyncio.get_running_loop().create_future()
        self._learner = (core_s, done)
        self._plan()
        await done

    def pause(self, paused: bool) -> None:
        """Stop all rollouts, or let them go on."""
        self._advance()
        self._paused = paused
        self._plan()

    def _rates(self) -> tuple[float, float]:
        """Cores of the learner, and of all rollouts together."""
        wanted = 0.0 if self._paused else min(self._num_jobs * self._one_rollout, self._rollouts_limit)
        limit = self._learner_limit if self._learner else 0.0
        learner = min(limit, max(self._total / 2, self._total - wanted))
        return learner, min(wanted, self._total - learner)

    def _advance(self) -> None:
        """Bring the books up to now, and end what is done."""
        now = asyncio.get_running_loop().time()
        seconds, self._at_s = now - self._at_s, now
        learner, rollouts = self._rates()
        if self._num_jobs and not self._paused:
            self._service += seconds * rollouts / self._num_jobs
            self.busy_s += seconds
        self.rollout_core_s += seconds * rollouts
        self.learner_core_s += seconds * learner
        while self._jobs and self._jobs[0][0] <= self._service + TINY:
            heapq.heappop(self._jobs)[2].set_result(None)
            self._num_jobs -= 1
        if self._learner:
            self.learner_busy_s += seconds
            left, done = self._learner[0] - seconds * learner, self._learner[1]
            self._learner = (left, done) if left > TINY else None
            if self._learner is None:
                done.set_result(None)

    def _plan(self) -> None:
        """Set the timer to the next end of a job."""
        if self._timer:
            self._timer.cancel()
        learner, rollouts = self._rates()
        ends = []
        if self._learner:
            ends.append(self._learner[0] / learner)
        if self._jobs and rollouts:
            ends.append((self._jobs[0][0] - self._service) * self._num_jobs / rollouts)
        self._timer = asyncio.get_running_loop().call_later(max(min(ends), TINY), self._ring) if ends else None

    def _ring(self) -> None:
        self._advance()
        self._plan()
