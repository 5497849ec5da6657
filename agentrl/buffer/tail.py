"""Tail batching: the tasks that a step does not wait for are played again together (RollPacker, arXiv 2509.21009).

A short step plays more groups than it needs and begins with the first that finish; the others end, and their tasks
wait here. Once they are enough for a step, the next step is long: it plays these tasks alone and waits for each. So a
long task delays one step in several, every task is trained, and every trained token is of the present weights.

RollPacker also samples more answers to a task than it trains and keeps the first. That is left out: in one group it
prefers short answers, and groups here are whole.

Pure: tasks in, tasks out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from agentrl.types import Task


class TailQueue:
    """The tasks that wait for a long step, in the order in which they came.

    Args:
        groups_per_step: tasks of a long step.
        waiting: from an earlier process.
        is_long: whether the present step is long, which began in an earlier process.

    >>> queue = TailQueue(groups_per_step=1)
    >>> queue.put([Task(id="slow", prompt="?")])
    >>> queue.next() is None  # the present step is a short one
    True
    >>> queue.begin()
    >>> queue.is_long, queue.next().id
    (True, 'slow')
    """

    def __init__(self, *, groups_per_step: int, waiting: Iterable[Task] = (), is_long: bool = False) -> None:
        self.is_long = is_long
        """Whether the present step plays the waiting tasks."""
        self._groups_per_step = groups_per_step
        self._waiting = deque(waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        """A step begins."""
        self.is_long = len(self._waiting) >= self._groups_per_step

    def num_slots(self, short: int) -> int:
        """Groups that the present step plays at once; `short`: in a short step."""
        return self._groups_per_step if self.is_long else short

    def next(self) -> Task | None:
        """The task to play now; None: a new one, because the step is short or none waits any more."""
        return self._waiting.popleft() if self.is_long and self._waiting else None

    def put(self, tasks: Iterable[Task]) -> None:
        """These tasks wait from now on."""
        self._waiting.extend(tasks)
