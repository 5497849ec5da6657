"""Tool calls that wait, and the clock of a run, which skips the time in which everything waits.

A wait depends on the seed of the run's tasks, the task, the member of its group and the number of the call alone, so
every arm meets the same waits. Independent of arms, engines and learners.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Annotated, Any, ClassVar

from agentrl.env import Episode
from agentrl.tools import tool
from agentrl.types import Message, Task
from envs.modmath import ModMath

CUT_MEDIANS = 20.0
"""No wait is longer than this many medians."""
SETTLE_S = 0.004
"""Everything must have been waiting for this long before time is skipped."""


def wait_s(task_id: str, member: int, call: int, *, sigma: float, median_s: float) -> float:
    """Seconds that a call waits: log-normal with this median, cut at CUT_MEDIANS medians. Pure.

    >>> wait_s("train-0-1-lcm", 0, 0, sigma=0.0, median_s=2.0)
    2.0
    """
    drawn = math.exp(sigma * Random(f"wait/{task_id}/{member}/{call}").gauss(0.0, 1.0))
    return median_s * min(drawn, CUT_MEDIANS)


def median_for(mean_episode_s: float, *, calls: float, sigma: float) -> float:
    """The median wait of a call for which an episode of `calls` calls waits `mean_episode_s` on average, uncut."""
    return mean_episode_s / (calls * math.exp(sigma**2 / 2))


class Clock:
    """Seconds of a run: real ones, and those that are skipped because nothing computes.

    Time is skipped when every episode that has begun waits in a tool call and `is_idle` says that the learner, the
    engine and the weights between them stand still as well. The clock then jumps to the next wake-up.

    Args:
        is_idle: whether everything but the episodes waits; asked again and again while all episodes wait.
        skips: False sleeps every second.

    Example:
        clock = Clock(is_idle=lambda: True)
        await clock.wait(30.0)  # returns at once if nothing else runs; clock.now() is 30 s later
    """

    def __init__(self, *, is_idle: Callable[[], bool] = lambda: True, skips: bool = True) -> None:
        self._is_idle = is_idle
        self._skips = skips
        self.skipped_s = 0.0
        """Seconds that were not slept."""
        self.num_computing = 0
        """Episodes that have begun or are about to, and do not wait."""
        self._due: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()
        self._skipper: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Seconds on this clock; only differences mean something."""
        return time.monotonic() + self.skipped_s

    async def wait(self, seconds: float) -> None:
        """Wait as a tool does."""
        woken = asyncio.Event()
        entry = (self.now() + seconds, next(self._numbers), woken)
        heapq.heappush(self._due, entry)
        self.num_computing -= 1
        try:
            self._start_skipping()
            while (left_s := entry[0] - self.now()) > 0 and not woken.is_set():
                try:
                    async with asyncio.timeout(left_s):
                        await woken.wait()
                except TimeoutError:
                    continue
        finally:
            self.num_computing += 1
            if entry in self._due:
                self._due.remove(entry)
                heapq.heapify(self._due)

    def episode_ended(self) -> None:
        """An episode that computed is over."""
        self.num_computing -= 1
        self._start_skipping()

    def _start_skipping(self) -> None:
        if self._skips and not self.num_computing and (self._skipper is None or self._skipper.done()):
            self._skipper = asyncio.create_task(self._skip(), name="skipping")

    async def _skip(self) -> None:
        """Jump whenever everything has waited for SETTLE_S, until an episode computes again."""
        while not self.num_computing and self._due:
            before = self._due[0]
            await asyncio.sleep(SETTLE_S)
            if self.num_computing or not self._due or self._due[0] is not before or not self._is_idle():
                continue
            due_s, _, woken = heapq.heappop(self._due)
            self.skipped_s += max(0.0, due_s - self.now())
            woken.set()
            await asyncio.sleep(0)


class WaitingModMath(ModMath):
    """The quickstart's task, whose `python` tool waits before it runs the code.

    Example:
        env:
          target: benchmarks.asynchrony.waits:WaitingModMath
          kwargs: {sigma: 1.0, median_s: 0.6}
    """

    clock: ClassVar[Clock] = Clock(skips=False)
    """Of the run that is being made."""
    waited_s: ClassVar[dict[str, list[float]]] = defaultdict(list)
    """Of each task, the seconds that each of its finished episodes waited."""
    num_calls: ClassVar[Counter[int]] = Counter()
    """Finished episodes by their number of calls."""
    _members: ClassVar[Counter[str]] = Counter()
    _closed: ClassVar[Counter[str]] = Counter()
    _expected: ClassVar[Counter[str]] = Counter()
    """Of each task, the episodes that count as computing and have not begun."""
    _repeated: ClassVar[Counter[str]] = Counter()
    """Of each task, the episodes that began again after a failure."""

    def __init__(self, *, sigma: float = 0.0, median_s: float = 0.0, group_size: int = 8) -> None:
        self._sigma = sigma
        self._median_s = median_s
        self._group_size = group_size
        self._task_id = ""
        self._member = self._calls = 0
        self._waited_s = 0.0

    @classmethod
    def begin_run(cls, clock: Clock) -> None:
        """Forget the run before."""
        cls.clock = clock
        cls.waited_s.clear()
        for counter in (cls._members, cls._closed, cls._expected, cls._repeated):
            counter.clear()
        cls.num_calls.clear()

    @classmethod
    @contextmanager
    def computing(cls, task: Task, num_episodes: int) -> Iterator[None]:
        """While the block runs, so many episodes of the task compute unless they wait or are closed."""
        clock, before = cls.clock, cls._closed[task.id] - cls._repeated[task.id]
        clock.num_computing += num_episodes
        cls._expected[task.id] = num_episodes
        try:
            yield
        finally:  # a cancelled episode may never have begun
            cls._expected[task.id] = 0
            clock.num_computing -= num_episodes - (cls._closed[task.id] - cls._repeated[task.id] - before)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See WithPython. The n-th episode of a task is member n of its group; a task that is played again meets the
        same waits again."""
        self._task_id, self._member = task.id, self._members[task.id] % self._group_size
        self._members[task.id] += 1
        if self._expected[task.id]:
            self._expected[task.id] -= 1
        else:  # it failed, was closed, and computes again
            self._repeated[task.id] += 1
            self.clock.num_computing += 1
        return await super().reset(task=task, seed=seed)

    @tool
    async def python(self, code: Annotated[str, "Python source; print what you need to see"]) -> str:
        """Run Python code. Variables persist between calls."""
        seconds = wait_s(self._task_id, self._member, self._calls, sigma=self._sigma, median_s=self._median_s)
        self._calls += 1
        if seconds > 0:
            await self.clock.wait(seconds)
            self._waited_s += seconds
        return await super().python(code)

    async def score(self, episode: Episode) -> dict[str, float]:
        """See BoxedMath. An episode that is cancelled has no score and is not counted as finished."""
        self.waited_s[self._task_id].append(self._waited_s)
        self.num_calls[self._calls] += 1
        return await super().score(episode)

    async def close(self) -> None:
        """See WithPython."""
        await super().close()
        if self._task_id:
            self._closed[self._task_id] += 1
            self.clock.episode_ended()
