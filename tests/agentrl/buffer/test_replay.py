"""Replay: what a batch has beside its new groups, also after a crash; nothing is lost and nothing counted twice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from agentrl.buffer.journal import Journal
from agentrl.buffer.journal_format import StepState
from agentrl.buffer.replay import Replay
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config import parse
from agentrl.rollouts.settings import settings_of
from agentrl.testing import one_token_group
from agentrl.types import Batch, Task, TrajectoryGroup

TASK = Task(id="t", prompt="?")
CAPACITY = 3


def make_group(group_id: int, *, version: int = 0, size: int = 2) -> TrajectoryGroup:
    rewards = [float(index % 2) for index in range(size)]
    return one_token_group(group_id, task=TASK, versions=[version] * size, rewards=rewards)


def make_replay(per_step: float = 1.5, *, group_size: int = 2) -> Replay:
    return Replay(per_step=per_step, capacity=CAPACITY, group_size=group_size, seed=7)


def test_of_everything_trained_the_share_recent_is_new() -> None:
    rollout = {"groups_per_step": 8, "group_size": 20, "replay": {"recent": 0.8, "multiplier": 1.2}}
    tree = {"name": "n", "env": {"target": "ModMath-v0"}, "model": {"path": "m"}, "rollout": rollout}
    config = parse(tree, source="x")
    replay = Replay.of(config)
    assert replay is not None and settings_of(config)["train"].config.group_size == 24  # TBA: S = 24, K = 20
    num_again = sum(replay.num_due(step) for step in range(1, 101))
    assert 800 / (800 + num_again) == pytest.approx(0.8, abs=1e-3)
    assert {replay.num_due(step) for step in range(1, 101)} == {2}


def test_earlier_groups_are_drawn_evenly_from_the_newest_and_never_twice_in_a_batch() -> None:
    replay, drawn = make_replay(2), Counter[int]()
    assert replay.batch(1, [make_group(0)]) == ((make_group(0),), 0)  # there is none before
    replay.add([make_group(1), make_group(2), make_group(3)])
    for step in range(2, 602):
        groups, num_again = make_replay_like(replay, step)
        ids = [group.group_id for group in groups[1:]]
        assert num_again == len(ids) == len(set(ids)) == 2 and ids == sorted(ids)
        drawn.update(ids)
    assert set(drawn) == {1, 2, 3}  # group 0 is beyond the capacity
    assert all(count == pytest.approx(400, abs=50) for count in drawn.values())


def make_replay_like(replay: Replay, step: int) -> tuple[tuple[TrajectoryGroup, ...], int]:
    """The batch of `step` from the same earlier groups."""
    same = make_replay(2)
    same.add(replay.remembered)
    return same.batch(step, [make_group(1000 + step)])


def test_of_more_episodes_each_draw_has_the_size_of_a_group() -> None:
    replay, seen = make_replay(1, group_size=4), Counter[str]()
    whole = make_group(0, size=5)
    for step in range(1, 201):
        groups, _ = replay.batch(step, [whole])
        assert all(len(group.episodes) == 4 for group in groups)
        seen.update(episode.id for episode in groups[0].episodes)
    assert set(seen) == {episode.id for episode in whole.episodes}
    assert all(count == pytest.approx(160, abs=25) for count in seen.values())


class Life:
    """A run of two groups a step whose learner saves every third version, on one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path, keep_trained=CAPACITY)
        self.saved = 0
        self.start(None)

    def start(self, version: int | None) -> None:
        resumed = None if version is None else self.journal.resume_at(version)
        replay = make_replay()
        replay.add(resumed.trained if resumed else ())
        self.buffer = TrajectoryBuffer(
            StalenessRule(groups_per_step=2, max_lag=1), journal=self.journal, replay=replay, resumed=resumed
        )

    async def step(self) -> Batch:
        while not self.buffer.ledger().training and self.buffer.ledger().ready < 2:  # training: it must catch up first
            group_id, _ = await self.buffer.admit(lambda: (TASK, 0))
            await self.buffer.finish(make_group(group_id, version=self.buffer.version))
        batch = await self.buffer.take()
        version = batch.policy_version + 1
        await self.buffer.commit(version)
        self.saved = version if version % 3 == 0 else self.saved
        self.journal.step_made(version, StepState(ess_guard={}, train_s=0.0), resumable_from=self.saved)
        assert self.buffer.ledger().balanced()
        return batch

    def crash(self, version: int) -> None:
        """`kill -9`; the learner returns at `version`."""
        self.journal.close()
        self.journal = Journal(self.path, keep_trained=CAPACITY)
        self.start(version)


async def test_after_a_crash_a_batch_has_the_same_earlier_groups_and_each_group_counts_once(tmp_path: Path) -> None:
    rng, life, batches = random.Random(0), Life(tmp_path / "journal.sqlite"), dict[int, Batch]()
    for _ in range(60):
        batch = await life.step()
        version = batch.policy_version + 1
        if version in batches:
            assert batch == batches[version]
        batches[version] = batch
        if rng.random() < 0.3:
            life.crash(rng.randint(life.saved, version))
    last = max(batches)
    assert last > 20
    assert life.buffer.ledger().trained + life.buffer.ledger().training == 2 * last
    new = [group.group_id for batch in batches.values() for group in batch.groups[: -batch.num_replayed or None]]
    assert len(new) == len(set(new)) == 2 * last
    replayed = sum(batch.num_replayed for batch in batches.values())
    assert replayed == pytest.approx(1.5 * last, abs=4)
    assert any(batch.policy_version - group.policy_version > 1 for batch in batches.values() for group in batch.groups)
    life.journal.close()


async def test_only_what_may_be_trained_again_stays_on_disk(tmp_path: Path) -> None:
    life = Life(tmp_path / "journal.sqlite")
    for _ in range(9):
        await life.step()
    assert [group.group_id for group in life.journal.trained_until(9)] == [15, 16, 17]
    assert life.journal.trained_until(6) == ()  # the learner never returns before version 9
    life.journal.close()
