"""Tasks that are seeds, for environments that generate their problems. Independent of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from agentrl.env import Split
from agentrl.types import Task

TEST_SEEDS_FROM = 2**30
"""The first seed of `test`; those of `train` are below it. All are positive 32-bit numbers."""


def seed_tasks(split: Split, *, prompt: str, seed: int, num_test_tasks: int) -> Iterator[Task]:
    """Tasks with `metadata["seed"]`: endless for `train`, always the same `num_test_tasks` for `test`."""
    if split == "test":
        for index in range(num_test_tasks):
            yield Task(id=f"test-{index}", prompt=prompt, metadata={"seed": TEST_SEEDS_FROM + index})
        return
    rng = Random(f"seeds/{seed}")
    for index in count():
        yield Task(id=f"train-{seed}-{index}", prompt=prompt, metadata={"seed": rng.randrange(TEST_SEEDS_FROM)})
