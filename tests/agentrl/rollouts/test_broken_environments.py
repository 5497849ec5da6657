"""Whole runs in which the grader or the environment breaks. No reward comes of it, and the error names the part."""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.env import Episode, Split
from agentrl.env.canary import Canaries
from agentrl.errors import CanaryFailed, ErrorRateExceeded
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task
from envs.aime import Aime
from envs.math_python import Math
from tests.agentrl.rollouts.broken_runs import (
    Halves,
    Known,
    assert_every_reward_is_earned,
    config_for,
    outcome,
    recorded,
)
from tests.agentrl.training.troubles import Trouble

CANARY = Trouble("canary ...: ... Rewards since the last good check cannot be trusted")


def kill_graders() -> int:
    """SIGKILL to the math-verify workers of this process; how many there were."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"envs.equality_worker" in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


@contextmanager
def deadly_for_graders() -> Iterator[Callable[[], None]]:
    """From the call of what is yielded, every grader is killed as soon as it lives."""
    begin, end = threading.Event(), threading.Event()

    def hunt() -> None:
        begin.wait()
        while not end.wait(0.02):
            kill_graders()

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield begin.set
    finally:
        end.set()
        begin.set()
        hunter.join()


async def test_graders_that_keep_dying_end_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    with deadly_for_graders() as start_killing:
        error = await outcome(config, tokenizer, Halves, start_killing)
    assert isinstance(error, ErrorRateExceeded)
    assert re.search("The first failure: grader: (the math-verify worker|math-verify gave no answer)", str(error))
    assert_every_reward_is_earned(config)


async def test_a_grader_that_dies_once_costs_a_second_try(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path, steps=3, max_lag=0, max_retries=2)
    killed: list[int] = []
    assert await outcome(config, tokenizer, Halves, lambda: killed.append(kill_graders())) is None
    assert sum(killed) >= 1
    assert sum(trajectory.info.get("retries", 0) for trajectory in recorded(config)) >= 1
    assert_every_reward_is_earned(config)


class Breaks(Aime):
    """Fails where `part` says once it is broken."""

    canary_answers = Known.canary_answers
    system_prompt = "Think."
    part: ClassVar = ""
    is_broken: ClassVar = False

    @classmethod
    def broken(cls, part: str) -> None:
        if cls.is_broken and cls.part == part:
            raise RuntimeError(f"{part} has lost its table")

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterator[Task]:
        for number in range(1000 if split == "train" else 4):
            cls.broken("tasks")
            yield Task(id=f"{split}-{number}", prompt="Find it.", answer="33")

    async def reset(self, *, task: Task, seed: int | None = None) -> Any:
        self.broken("reset")
        return await super().reset(task=task, seed=seed)

    async def step(self, action: Any) -> Any:
        self.broken("step")
        return await super().step(action)

    async def score(self, episode: Episode) -> dict[str, float]:
        self.broken("score")
        return await super().score(episode)

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        self.broken("score_group")
        return [{} for _ in episodes]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("reset", "reset of task train-"),
        ("step", "Breaking.step: RuntimeError: step has lost its table"),
        ("score", "score of task train-"),
        ("score_group", "Breaking.score_group of task train-"),
        ("tasks", "Breaking.tasks: RuntimeError: tasks has lost its table"),
    ],
)
async def test_an_environment_that_raises_ends_the_run(
    tmp_path: Path, tokenizer: TurnTokenizer, part: str, said: str
) -> None:
    class Breaking(Breaks):
        pass

    Breaking.part = part
    config = config_for(tmp_path)
    error = await outcome(config, tokenizer, Breaking, partial(setattr, Breaking, "is_broken", True))
    assert error is not None
    assert said in str(error)
    assert "has lost its table" in "".join(traceback.format_exception(error)).split("RuntimeError")[1]
    assert "in broken" in "".join(traceback.format_exception(error))  # the line that raised
    assert_every_reward_is_earned(config)


async def test_a_data_file_that_vanishes_is_not_missed(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    """Rows are in memory from the start: the run goes on without the file."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "Halve 1.", "answer": "\\\\frac{1}{2}"}\n')

    class FromFile(Halves):
        @classmethod
        def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
            return Math.tasks(split, data=str(path), seed=seed)

    config = config_for(tmp_path, steps=4)
    assert await outcome(config, tokenizer, FromFile, path.unlink) is None
    assert not path.exists()
    assert_every_reward_is_earned(config)


async def test_a_grader_that_begins_to_lie_is_found_by_its_canaries(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    class Lies(Breaks):
        async def score(self, episode: Episode) -> dict[str, float]:
            return {"correct": 0.0} if self.is_broken else await super().score(episode)

    config = config_for(tmp_path, canary_every=1)
    canaries = Canaries(Lies, make_env=Lies, sandbox=None)
    await canaries.check(when="at the start")
    error = await outcome(config, tokenizer, Lies, partial(setattr, Lies, "is_broken", True), canaries=canaries)
    assert isinstance(error, CanaryFailed) and CANARY.is_in(error)
    assert "the grader gave 0 instead of 1 to '\\\\boxed{033}'" in str(error)
