"""Where the next task comes from: an environment's rows, endlessly, tasks given back first. Knows no engine, no lag.

The order is fixed by the seed, and with `difficulty` by the solve counts too: a source made anew goes on like the one
that was lost once it was told the `cursor` (skip), the groups that finished (observe) and the tasks given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from agentrl.config import EnvConfig
from agentrl.data.curriculum import SolveRates, TaskChoice
from agentrl.data.rows import endless
from agentrl.env import Env, attributed
from agentrl.errors import ConfigError
from agentrl.types import Task

# A finite training set is shuffled anew every epoch; a generator that yields more rows than this is taken as endless.
MAX_FINITE_ROWS = 1_000_000


class TaskSource:
    """Training tasks in an order fixed by the seed.

    Args:
        choice: "shuffled" plays every row of the stream; "difficulty" passes most of those over whose solve rate is far
            from one half (agentrl/data/curriculum.py).
    """

    def __init__(self, env_class: type[Env], config: EnvConfig, *, seed: int, choice: TaskChoice = "shuffled") -> None:
        self._what = f"{env_class.__name__}.tasks"
        self._seed = seed
        self._choice = choice
        self._rates = SolveRates()
        self._returned: deque[Task] = deque()
        self._cursor = 0
        # The first row is read now: a file that cannot be read should cost a second, not a started engine.
        with attributed(self._what):
            rows = _stream(env_class, config, seed)
            self._rows = chain([next(rows)], rows)

    @property
    def cursor(self) -> int:
        """Rows of the stream that were played or passed over so far."""
        return self._cursor

    def next(self) -> Task:
        """A task given back, or the next row that is asked. Raises EnvError when the environment's rows fail."""
        if self._returned:
            return self._returned.popleft()
        while True:
            place, task = self._cursor, self._draw()
            if self._choice == "shuffled" or self._rates.is_asked(task.id, place=place, seed=self._seed):
                return task

    def give_back(self, task: Task) -> None:
        """Ask this task again before new ones."""
        self._returned.append(task)

    def observe(self, task_id: str, rewards: Sequence[float]) -> None:
        """The rewards of a finished group, one an episode, whatever becomes of the group."""
        self._rates.observe(task_id, rewards)

    def skip(self, cursor: int) -> None:
        """Pass over the rows up to `cursor`, as a run did before. Raises ValueError when they are drawn already."""
        if cursor < self._cursor:
            raise ValueError(f"the source stands at row {self._cursor}, beyond row {cursor}")
        while self._cursor < cursor:
            self._draw()

    def _draw(self) -> Task:
        with attributed(self._what):
            task = next(self._rows)
        self._cursor += 1
        return task


def held_out_tasks(env_class: type[Env], config: EnvConfig, *, num_tasks: int) -> list[Task]:
    """The first `num_tasks` rows of the test split. Raises ConfigError when there are none, EnvError."""
    with attributed(f"{env_class.__name__}.tasks"):
        tasks = list(islice(env_class.tasks("test", data=config.eval_data), num_tasks))
    if not tasks:
        raise ConfigError(f"{config.target} has no test tasks; set env.eval_data: docs/math.md")
    return tasks


def _stream(env_class: type[Env], config: EnvConfig, seed: int) -> Iterator[Task]:
    rows = iter(env_class.tasks("train", data=config.train_data, seed=seed))
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{config.target} has no training tasks; set env.train_data: docs/math.md")
    if config.train_data is None:
        yield first
        yield from rows
        # A generator that ended is a finite set: go on with it, epoch after epoch.
        rows = iter(env_class.tasks("train", data=config.train_data, seed=seed))
        yield from endless(list(islice(rows, MAX_FINITE_ROWS)), seed=seed)
    drawn, ids = [first], {first.id}
    for row in islice(rows, MAX_FINITE_ROWS):
        drawn.append(row)
        if row.id in ids:  # epochs of the environment's own making: they are shuffled already
            yield from drawn
            yield from rows
        ids.add(row.id)
    yield from endless(drawn, seed=seed)
