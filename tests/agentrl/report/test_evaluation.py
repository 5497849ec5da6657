"""Several held-out sets at once: what is reported of each, how many episodes run, and that no versions are mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from agentrl.errors import EngineError, WeightSyncError
from agentrl.report.evaluation import Evaluation, HeldOutSet, evaluate, evaluate_sets
from agentrl.run_folder import EpisodeKind
from agentrl.testing import one_token_group
from agentrl.types import Task, TrajectoryGroup

TASKS = [Task(id=str(number), prompt="?") for number in range(5)]


@dataclass
class Player:
    """Plays groups of `size` episodes of one token, and counts them."""

    size: int
    versions: Sequence[int] = (3,)
    fails: bool = False
    playing: list[int] = field(default_factory=lambda: [0])
    most: list[int] = field(default_factory=lambda: [0])
    began: list[tuple[int, int]] = field(default_factory=list)

    async def play_group(self, model: str, group_id: int, task: Task, /, *, kind: EpisodeKind) -> TrajectoryGroup:
        assert (model, kind, task) == ("model", "eval", TASKS[group_id])
        self.began.append((self.size, group_id))
        self.playing[0] += self.size
        self.most[0] = max(self.most[0], self.playing[0])
        await asyncio.sleep(0)
        if self.fails:
            raise EngineError("gone")
        await asyncio.sleep(0.002)
        self.playing[0] -= self.size
        versions = [self.versions[group_id % len(self.versions)]] * self.size
        return one_token_group(group_id, versions=versions, rewards=[0.0] * self.size)


def sets_of(*players: Player) -> list[HeldOutSet[str]]:
    names = ("a", "b", "c")
    return [
        HeldOutSet(name=name, tasks=TASKS[: len(TASKS) - at], num_plays=player.size, play_group=player.play_group)
        for at, (name, player) in enumerate(zip(names, players, strict=False))
    ]


async def test_each_set_has_its_own_result_and_all_share_the_room() -> None:
    first = Player(4)
    second = Player(3, playing=first.playing, most=first.most, began=first.began)
    finished: list[str] = []
    shown: list[tuple[int, int]] = []

    async def remember(evaluation: Evaluation) -> None:
        finished.append(evaluation.result.set_name)

    found = await evaluate_sets(
        sets_of(first, second),
        "model",
        policy_version=3,
        max_concurrent_episodes=8,
        finished=remember,
        progress=lambda done, total: shown.append((done, total)),
    )
    assert [(one.result.set_name, one.result.num_tasks, one.result.n) for one in found] == [("a", 5, 4), ("b", 4, 3)]
    assert finished == ["a", "b"] and first.most[0] == 8
    assert shown == [(done, 9) for done in range(1, 10)]
    assert first.began[:5] == [(4, number) for number in range(5)], "the sets are played in their order"
    assert first.began[5] == (3, 0)


async def test_a_group_larger_than_the_room_is_played_alone() -> None:
    player = Player(4)
    await evaluate_sets(sets_of(player), "model", policy_version=3, max_concurrent_episodes=1)
    assert player.most[0] == 4


async def test_a_set_that_fails_ends_the_evaluation_of_all() -> None:
    finished: list[Evaluation] = []

    async def remember(evaluation: Evaluation) -> None:
        finished.append(evaluation)

    with pytest.raises(EngineError, match="gone"):
        await evaluate_sets(
            sets_of(Player(2, fails=True), Player(2)),
            "model",
            policy_version=3,
            max_concurrent_episodes=99,
            finished=remember,
        )
    assert finished == [], "no mean over the tasks that worked"


async def test_tokens_of_another_version_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="the evaluation of version 3 has tokens of version 4"):
        await evaluate_sets(
            sets_of(Player(2), Player(2, versions=(3, 4))), "model", policy_version=3, max_concurrent_episodes=8
        )


@pytest.mark.parametrize(("versions", "said"), [((3,), "version 3"), ((4, 3, 7), "versions 3 to 7")])
async def test_of_a_server_that_is_measured_the_versions_are_named(versions: tuple[int, ...], said: str) -> None:
    player = Player(2, versions=versions)
    evaluation = await evaluate(
        TASKS,
        make_group=lambda index, task: player.play_group("model", index, task, kind="eval"),
        policy_version=None,
        max_concurrent_groups=2,
    )
    assert evaluation.result.versions == said and evaluation.result.policy_version == 3
    assert evaluation.result.metrics()["eval/policy_version"] == 3


async def test_a_named_set_has_metrics_of_its_own() -> None:
    (found,) = await evaluate_sets(sets_of(Player(2)), "model", policy_version=3, max_concurrent_episodes=8)
    metrics = found.result.metrics()
    assert metrics["eval/a/num_tasks"] == 5 and metrics["eval/a/policy_version"] == 3
    assert all(name.startswith("eval/a/") for name in metrics)
