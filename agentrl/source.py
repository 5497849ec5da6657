"""Where the next task comes from: an environment's rows, endlessly, tasks given back first. Knows no engine, no lag."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from agentrl.config import EnvConfig
from agentrl.data import endless
from agentrl.env import Env, attributed
from agentrl.errors import ConfigError
from agentrl.types import Task

# A finite training set is shuffled anew every epoch; a generator that yields more rows than this is taken as endless.
MAX_FINITE_ROWS = 1_000_000


class TaskSource:
    """Training tasks in an order fixed by the seed."""

    def __init__(self, env_class: type[Env], config: EnvConfig, *, seed: int) -> None:
        self._rows = _stream(env_class, config, seed)
        self._what = f"{env_class.__name__}.tasks"
        # The first row is read now: a file that cannot be read should cost a second, not a started engine.
        self._returned: deque[Task] = deque([self._read()])

    def next(self) -> Task:
        """A task given back, or the next row. Raises EnvError when the environment's rows fail."""
        return self._returned.popleft() if self._returned else self._read()

    def give_back(self, task: Task) -> None:
        """Ask this task again before new ones."""
        self._returned.append(task)

    def _read(self) -> Task:
        with attributed(self._what):
            return next(self._rows)


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
