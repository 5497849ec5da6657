"""Which tasks are worth asking now, from how often they were solved. Knows no rows, no groups, no order of the stream.

Rows are thinned and not sorted: every row of the stream is asked with a probability that is highest where the solve
rate is one half. The rate at which a task is asked is then proportional to its worth, and no task's ever becomes zero,
so nothing starves: with groups of G, a task that is never solved, or always, is asked every (G / 2 + 1)-th time that it
comes by. A row's fate depends on the seed, its place in the stream and the counts alone: a resumed run repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

TaskChoice = Literal["shuffled", "difficulty"]

MEMORY = 0.5
"""What the counts of earlier groups still weigh when a task was played again: the policy has changed since."""


class SolveRates:
    """How often each task was solved, as a Beta distribution over its solve rate: Beta(1, 1) for a task never seen."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # solved, not solved

    def observe(self, task_id: str, rewards: Sequence[float]) -> None:
        """The rewards of one finished group, one an episode; outside [0, 1] they count as the nearer end."""
        solved, failed = self._counts.get(task_id, (0.0, 0.0))
        gained = sum(min(1.0, max(0.0, reward)) for reward in rewards)
        self._counts[task_id] = (MEMORY * solved + gained, MEMORY * failed + len(rewards) - gained)

    def worth(self, task_id: str) -> float:
        """4 E[p (1 - p)] over the Beta distribution of the solve rate p: in (0, 1), towards 1 near one half.

        p (1 - p) is the variance of a reward that is 0 or 1, and the size of what a policy gradient learns from the
        task: Foster et al., "Learning to Reason at the Frontier of Learnability", arXiv 2502.12272.
        """
        solved, failed = self._counts.get(task_id, (0.0, 0.0))
        a, b = 1 + solved, 1 + failed
        return 4 * a * b / ((a + b) * (a + b + 1))

    def is_asked(self, task_id: str, *, place: int, seed: int) -> bool:
        """Whether row `place` of the stream, which holds this task, is played or passed over. True with P = worth."""
        return random.Random(f"{seed}/{place}").random() < self.worth(task_id)
