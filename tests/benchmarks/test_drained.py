"""Updates that wait for the groups in flight: no group is of two versions, and everything still moves."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from agentrl.chat.runners import TokenRunners
from agentrl.engine.base import Engine, TrainableEngine
from agentrl.env import Action, StepResult
from agentrl.errors import EngineError
from agentrl.rollouts.group import GroupPlayer, PlayGroup
from agentrl.rollouts.settings import settings_of
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message, Probe, Task, TrajectoryGroup, WeightsRef, user
from benchmarks.asynchrony.drained import Drained
from tests.agentrl.training.whole_run import SayYes, YesAndNo, make_config


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> TurnTokenizer:
    return TurnTokenizer.load(str(tiny_model_dir)).with_tool_format("auto")


TASK = Task(id="t", prompt="Say yes.", answer="yes")


class SayYesTwice(SayYes):
    """Two turns, between which weights can change."""

    def __init__(self) -> None:
        self._turns = 0

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        said: list[Message] = [] if self._turns == 2 else [user("Again.")]
        return StepResult(said, 0.0, self._turns == 2, False, {})


def weights(version: int) -> WeightsRef:
    probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
    return WeightsRef(policy_version=version, num_bytes=0, update_info={}, checksum="", probe=probe)


def player_for(tmp_path: Path, tokenizer: TurnTokenizer) -> GroupPlayer[Engine]:
    return GroupPlayer(SayYesTwice, settings_of(make_config(tmp_path)), TokenRunners(tokenizer))


async def played(engine: TrainableEngine, play_group: PlayGroup[Engine]) -> list[TrajectoryGroup]:
    """Groups that three slots play, one after the other, while the weights change ten times."""
    ids, groups, is_over = count(), [], False

    async def slot(late_s: float) -> None:
        await asyncio.sleep(late_s)
        while not is_over:
            groups.append(await play_group(engine, next(ids), TASK, kind="train"))

    async with asyncio.TaskGroup() as slots:
        for late_s in (0, 0.003, 0.007):
            slots.create_task(slot(late_s))
        for version in range(1, 11):
            await asyncio.sleep(0.013)
            await engine.update_weights(weights(version))
        is_over = True
    return groups


def num_mixed(groups: list[TrajectoryGroup]) -> int:
    return sum(len(versions_of(group)) > 1 for group in groups)


def versions_of(group: TrajectoryGroup) -> set[int]:
    return {version for one in group.trajectories for version in one.policy_versions()} - {-1}


async def test_no_group_is_of_two_versions_and_every_version_plays(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    player = player_for(tmp_path, tokenizer)
    plain = await played(YesAndNo(tokenizer, latency_s=0.01), player.play_group)
    assert num_mixed(plain) > 0
    drained = Drained(YesAndNo(tokenizer, latency_s=0.01), player.play_group)
    groups = await played(drained, drained.play_group)
    assert num_mixed(groups) == 0
    assert {group.policy_version for group in groups} >= set(range(10))
    assert not drained.is_draining and drained.num_tokens > 0


async def test_an_update_that_fails_or_waits_too_long_lets_groups_begin_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    player = player_for(tmp_path, tokenizer)
    drained = Drained(YesAndNo(tokenizer, latency_s=0.05), player.play_group, within_s=0.02)
    first = asyncio.create_task(drained.play_group(drained, 0, TASK, kind="train"))
    await asyncio.sleep(0)
    updating = asyncio.create_task(drained.update_weights(weights(1)))
    await asyncio.sleep(0)
    assert drained.is_draining
    second = asyncio.create_task(drained.play_group(drained, 1, TASK, kind="train"))
    with pytest.raises(EngineError, match=r"1 groups were still played 0\.02 s after an update"):
        await updating
    assert [(await group).policy_version for group in (first, second)] == [0, 0]
    await drained.update_weights(weights(2))
    assert (await drained.play_group(drained, 2, TASK, kind="train")).policy_version == 2
