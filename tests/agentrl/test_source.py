"""Training tasks: every row once an epoch, whoever makes the epochs; rows that fail are attributed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import EnvConfig
from agentrl.data import endless
from agentrl.env import Env, Split
from agentrl.errors import ConfigError, EnvError
from agentrl.source import TaskSource, held_out_tasks
from agentrl.types import Task
from envs.math_python import Math

TASKS = [Task(id=str(i), prompt="x") for i in range(20)]


class Rows(Env):
    """A finite set."""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return TASKS

    async def reset(self, *, task: Task, seed: int | None = None) -> Any: ...

    async def step(self, action: Any) -> Any: ...


class Epochs(Rows):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return endless(TASKS, seed=seed)


class Generated(Rows):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterator[Task]:
        return (Task(id=str(i), prompt="x") for i in count())


class Vanishing(Rows):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterator[Task]:
        yield from TASKS[:2]
        yield Task(id="2", prompt=Path("/no/such/file").read_text())


class Nothing(Rows):
    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return []


def ids(env_class: type[Env], data: str | None, number: int) -> list[str]:
    source = TaskSource(env_class, EnvConfig(target="x:X", train_data=data), seed=1)
    return [source.next().id for _ in range(number)]


@pytest.mark.parametrize(("env_class", "data"), [(Rows, None), (Rows, "file"), (Epochs, "file")])
def test_every_row_comes_once_an_epoch(env_class: type[Env], data: str | None) -> None:
    drawn = ids(env_class, data, 60)
    epochs = [drawn[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(task.id for task in TASKS)] * 3
    assert epochs[1] != epochs[2]


def test_a_file_of_rows_is_shuffled_from_the_start() -> None:
    assert ids(Rows, "file", 20) != [task.id for task in TASKS]


def test_a_generator_without_end_is_streamed() -> None:
    assert ids(Generated, None, 50) == [str(i) for i in range(50)]


def test_a_task_given_back_comes_first() -> None:
    source = TaskSource(Generated, EnvConfig(target="x:X"), seed=0)
    first = source.next()
    source.give_back(first)
    assert [source.next().id, source.next().id] == [first.id, "1"]


def test_rows_that_fail_are_the_environments_failure() -> None:
    source = TaskSource(Vanishing, EnvConfig(target="x:X"), seed=0)
    assert [source.next().id for _ in range(2)] == ["0", "1"]
    with pytest.raises(EnvError, match=r"Vanishing.tasks: FileNotFoundError: .*/no/such/file"):
        source.next()
    with pytest.raises(EnvError, match=r"Vanishing\.tasks"):
        held_out_tasks(Vanishing, EnvConfig(target="x:X"), num_tasks=5)


def test_a_missing_file_is_known_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read data file .*rows.jsonl: No such file"):
        TaskSource(Math, EnvConfig(target="x:X", train_data=str(tmp_path / "rows.jsonl")), seed=0)


def test_no_rows_name_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"set env\.train_data"):
        TaskSource(Nothing, EnvConfig(target="x:X"), seed=0)
    with pytest.raises(ConfigError, match=r"set env\.eval_data"):
        held_out_tasks(Nothing, EnvConfig(target="x:X"), num_tasks=3)
