"""Training tasks: every row once an epoch, however the epochs are made; rows that fail are attributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import EnvConfig
from agentrl.config.rollout import TaskChoice
from agentrl.data.rows import endless
from agentrl.data.source import TaskSource, held_out_tasks
from agentrl.env import Env, Split
from agentrl.errors import ConfigError, EnvError
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


def difficult(*, seed: int = 1) -> TaskSource:
    return TaskSource(Rows, EnvConfig(target="x:X", train_data="file"), seed=seed, choice="difficulty")


def test_by_difficulty_tasks_near_one_half_are_played_most_and_none_is_forgotten() -> None:
    source, played = difficult(), Counter[str]()
    for _ in range(400):
        task = source.next()
        played[task.id] += 1
        source.observe(task.id, [1.0] * 4 + [0.0] * 4 if int(task.id) < 5 else [0.0] * 8)
    assert set(played) == {task.id for task in TASKS}
    assert min(played[str(i)] for i in range(5)) > max(played[str(i)] for i in range(5, 20))


@pytest.mark.parametrize("choice", ["shuffled", "difficulty"])
@settings(max_examples=30, deadline=None)
@given(moves=st.lists(st.sampled_from(["next", "next", "give back", "good", "mixed"]), max_size=60))
def test_a_source_made_anew_goes_on_like_the_one_that_was_lost(choice: TaskChoice, moves: list[str]) -> None:
    """From what a journal holds: the cursor, the finished groups and the tasks that were given back and not issued."""

    def source() -> TaskSource:
        return TaskSource(Rows, EnvConfig(target="x:X", train_data="file"), seed=3, choice=choice)

    lost, given_back, finished = source(), list[Task](), list[tuple[str, list[float]]]()
    for move in moves:
        if move == "next":
            task = lost.next()
            if given_back:
                assert task == given_back.pop(0)
        elif move == "give back":
            given_back.append(TASKS[7])
            lost.give_back(TASKS[7])
        else:
            finished.append((TASKS[3].id, [1.0, 1.0 if move == "good" else 0.0]))
            lost.observe(*finished[-1])
    restored = source()
    restored.skip(lost.cursor)
    for task_id, rewards in finished:
        restored.observe(task_id, rewards)
    for task in given_back:
        restored.give_back(task)
    assert [restored.next() for _ in range(50)] == [lost.next() for _ in range(50)]


def test_rows_passed_over_and_tasks_given_back_are_what_the_cursor_says() -> None:
    source = TaskSource(Generated, EnvConfig(target="x:X"), seed=0)
    source.give_back(source.next())
    source.next()
    assert source.cursor == 1
    source.skip(10)
    assert (source.next().id, source.cursor) == ("10", 11)
    with pytest.raises(ValueError, match="beyond row 3"):
        source.skip(3)


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
