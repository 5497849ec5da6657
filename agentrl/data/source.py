"""Chooses the next task: returned tasks first, then an environment's rows, endlessly. Independent of engines and lag.

The order depends on the seed, and with `difficulty` on the solve counts too. A new source continues like a lost one
after it has been given the `cursor` (skip), the groups that finished (observe) and the tasks that were returned.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from agentrl.config import EnvConfig
from agentrl.config.rollout import TaskChoice
from agentrl.data.rows import endless
from agentrl.env import Env, attributed, rows_of
from agentrl.errors import ConfigError
from agentrl.types import Task

# A finite training set is shuffled again every epoch. A generator that yields more rows than this counts as endless.
MAX_FINITE_ROWS = 1_000_000
MEMORY = 0.5
"""Factor on the counts of earlier groups when a task is played again: the policy has changed since."""


class SolveRates:
    """How often each task was solved, as a Beta distribution over its solve rate: Beta(1, 1) for a task never seen.

    Rows are thinned and not sorted: every row of the stream is played with a probability that is highest where the
    solve rate is one half. The rate at which a task is played is then proportional to its worth, and never zero: with
    groups of G, a task that is never solved, or always, is played every (G / 2 + 1)-th time that it comes up. Whether
    a row is played depends on the seed, its place in the stream and the counts alone, so a resumed run repeats it.

    Example:
        >>> rates = SolveRates()
        >>> rates.observe("easy", [1.0] * 8)
        >>> rates.worth("easy") < rates.worth("new")
        True
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # solved, not solved

    def observe(self, task_id: str, rewards: Sequence[float]) -> None:
        """The rewards of one finished group, one an episode; outside [0, 1] they count as the nearer end."""
        solved, failed = self._counts.get(task_id, (0.0, 0.0))
        gained = sum(min(1.0, max(0.0, reward)) for reward in rewards)
        self._counts[task_id] = (MEMORY * solved + gained, MEMORY * failed + len(rewards) - gained)

    def worth(self, task_id: str) -> float:
        """4 E[p (1 - p)] over the Beta distribution of the solve rate p: in (0, 1), towards 1 near one half.

        p (1 - p) is the variance of a reward that is 0 or 1, to which the policy gradient of the task is
        proportional: Foster et al., "Learning to Reason at the Frontier of Learnability", arXiv 2502.12272.
        """
        solved, failed = self._counts.get(task_id, (0.0, 0.0))
        a, b = 1 + solved, 1 + failed
        return 4 * a * b / ((a + b) * (a + b + 1))

    def is_played(self, task_id: str, *, place: int, seed: int) -> bool:
        """Whether row `place` of the stream, which holds this task, is played. True with probability `worth`."""
        return random.Random(f"{seed}/{place}").random() < self.worth(task_id)


class TaskSource:
    """Training tasks in an order that the seed determines.

    Args:
        choice: "shuffled" plays every row of the stream; "difficulty" skips most rows whose solve rate is far from one
            half (see SolveRates).

    Example:
        source = TaskSource(ModMath, EnvConfig(target="ModMath-v0"), seed=0)
        task = source.next()
        source.observe(task.id, [1.0, 0.0, 0.0, 1.0])
    """

    def __init__(self, env_class: type[Env], config: EnvConfig, *, seed: int, choice: TaskChoice = "shuffled") -> None:
        self._what = f"{env_class.__name__}.tasks"
        self._seed = seed
        self._choice = choice
        self._rates = SolveRates()
        self._returned: deque[Task] = deque()
        self._cursor = 0
        # Read the first row now: an unreadable file should fail within a second, not after the engine has started.
        with attributed(self._what):
            rows = _stream(env_class, config, seed)
            self._rows = chain([next(rows)], rows)

    @property
    def cursor(self) -> int:
        """Rows of the stream that were played or skipped so far."""
        return self._cursor

    def next(self) -> Task:
        """A returned task, or the next row that is to be played. Raises EnvError when the environment's rows fail."""
        if self._returned:
            return self._returned.popleft()
        while True:
            place, task = self._cursor, self._draw()
            if self._choice == "shuffled" or self._rates.is_played(task.id, place=place, seed=self._seed):
                return task

    def give_back(self, task: Task) -> None:
        """Play this task again before new ones."""
        self._returned.append(task)

    def observe(self, task_id: str, rewards: Sequence[float]) -> None:
        """The rewards of a finished group, one for each episode, also where the group is not trained on."""
        self._rates.observe(task_id, rewards)

    def skip(self, cursor: int) -> None:
        """Skip the rows up to `cursor`, which an earlier run has drawn. Raises ValueError if this one is beyond it."""
        if cursor < self._cursor:
            raise ValueError(f"the source is at row {self._cursor}, beyond row {cursor}")
        while self._cursor < cursor:
            self._draw()

    def _draw(self) -> Task:
        with attributed(self._what):
            task = next(self._rows)
        self._cursor += 1
        return task


def held_out_tasks(
    env_class: type[Env], config: EnvConfig, *, num_tasks: int, key: str = "env.eval_data"
) -> list[Task]:
    """The first `num_tasks` rows of the test split. `key`: of the config, where their data is named.

    Raises ConfigError when there are none, EnvError.
    """
    with attributed(f"{env_class.__name__}.tasks"):
        tasks = list(islice(rows_of(env_class, "test", data=config.eval_data), num_tasks))
    if not tasks:
        raise ConfigError(f"{config.target} has no test tasks; set {key}: docs/math.md")
    return tasks


def first_training_tasks(env_class: type[Env], config: EnvConfig, *, seed: int, num_tasks: int) -> list[Task]:
    """The first `num_tasks` rows of the training split, in the environment's own order. Raises EnvError."""
    with attributed(f"{env_class.__name__}.tasks"):
        return list(islice(rows_of(env_class, "train", data=config.train_data, seed=seed), num_tasks))


def _stream(env_class: type[Env], config: EnvConfig, seed: int) -> Iterator[Task]:
    rows = rows_of(env_class, "train", data=config.train_data, seed=seed)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{config.target} has no training tasks; set env.train_data: docs/math.md")
    if config.train_data is None:
        yield first
        yield from rows
        # A generator that ended is a finite set: repeat it, epoch after epoch.
        rows = rows_of(env_class, "train", data=config.train_data, seed=seed)
        yield from endless(list(islice(rows, MAX_FINITE_ROWS)), seed=seed)
    drawn, ids = [first], {first.id}
    for row in islice(rows, MAX_FINITE_ROWS):
        drawn.append(row)
        if row.id in ids:  # the environment makes its own epochs, which are shuffled already
            yield from drawn
            yield from rows
        ids.add(row.id)
    yield from endless(drawn, seed=seed)
