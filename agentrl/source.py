"""Where the next task comes from: an environment's rows, endlessly, tasks given back first. Knows no engine, no lag."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from agentrl.config import EnvConfig
from agentrl.data import endless
from agentrl.env import Env
from agentrl.errors import ConfigError
from agentrl.types import Task

# A finite training set is shuffled anew every epoch; a generator that yields more rows than this is taken as endless.
MAX_FINITE_ROWS = 1_000_000


class TaskSource:
    """Training tasks in an order fixed by the seed."""

    def __init__(self, env_class: type[Env], config: EnvConfig, *, seed: int) -> None:
        self._returned: deque[Task] = deque()
        self._rows = _stream(env_class, config, seed)

    def next(self) -> Task:
        """A task given back, or the next row."""
        return self._returned.popleft() if self._returned else next(self._rows)

    def give_back(self, task: Task) -> None:
        """Ask this task again before new ones."""
        self._returned.append(task)


def held_out_tasks(env_class: type[Env], config: EnvConfig, *, num_tasks: int) -> list[Task]:
    """The first `num_tasks` rows of the test split. Raises ConfigError when there are none."""
    tasks = list(islice(env_class.tasks("test", data=config.eval_data), num_tasks))
    if not tasks:
        raise ConfigError(f"{config.target} has no test tasks; set env.eval_data to a JSONL file")
    return tasks


def _stream(env_class: type[Env], config: EnvConfig, seed: int) -> Iterator[Task]:
    rows = iter(env_class.tasks("train", data=config.train_data, seed=seed))
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{config.target} has no training tasks; set env.train_data to a JSONL file")
    if config.train_data is None:
        yield first
        yield from rows
        # A generator that ended is a finite set: go on with it, epoch after epoch.
        rows = iter(env_class.tasks("train", data=config.train_data, seed=seed))
        first = next(rows)
    yield from endless([first, *islice(rows, MAX_FINITE_ROWS)], seed=seed)
