"""Environments made of the real `verifiers` package, which runs in a virtual environment of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentrl import env as environments
from agentrl.config import RolloutConfig
from agentrl.env import Env, load_env_class
from agentrl.errors import ConfigError, EnvError
from agentrl.testing import Script, ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Trajectory, TrajectoryGroup
from tests.agentrl.rollouts.playing import play_group
from tests.envs.adapters.side_venv import python_of

HERE = Path(__file__).parent
LIMITS = RolloutConfig(max_context=1024, max_turn_tokens=100, episode_timeout_s=60, max_retries=0)
on_the_workers_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def dialogue() -> type[Env]:
    python = python_of(
        "verifiers", imports="import verifiers as vf, datasets; vf.ToolEnv, vf.Rubric, vf.load_environment"
    )
    options = {"python": str(python), "paths": [str(HERE)], "sampling": {"max_tokens": 60}}
    return load_env_class("verifiers:verifiers-doubling", options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make_dialogue(dialogue: type[Env]) -> AsyncIterator[Callable[[], Env]]:
    async with environments.opened(dialogue) as make:
        yield make


async def play(
    make: Callable[[], Env],
    script: Script,
    tokenizer: TurnTokenizer,
    *,
    index: int = 1,
    size: int = 1,
    **limits: Any,
) -> tuple[TrajectoryGroup, ScriptedEngine]:
    engine = ScriptedEngine(tokenizer=tokenizer, script=script, policy_version=5)
    task = list(make().tasks("train"))[index]
    group = await play_group(
        make,
        task,
        group_id=0,
        size=size,
        engine=engine,
        tokenizer=tokenizer,
        config=LIMITS.model_copy(update=limits),
    )
    return group, engine


def test_its_rows_are_the_tasks(dialogue: type[Env]) -> None:
    train, test = list(dialogue.tasks("train")), list(dialogue.tasks("test"))
    assert [task.answer for task in train] == ["0", "2", "4", "broken"]
    assert [task.id for task in test] == ["test-0", "test-1"]
    assert train[1].prompt == "Double it.\nTwice 1?"
    assert importlib.util.find_spec("verifiers") is None  # in our environment


@on_the_workers_loop
async def test_tokens_and_logprobs_come_back_exactly(
    make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer
) -> None:
    group, engine = await play(make_dialogue, ["7", "2"], tokenizer, size=3)
    assert group.rewards_G == [1.0] * 3
    first: Trajectory = group.trajectories[0]
    assert (len(first.turns), first.info["segments"], first.info["calls"]) == (2, 1, 2)
    assert first.rewards.items() >= {"reward": 1.0, "correct": 1.0, "length": 3.0, "num_turns": 2.0}.items()
    said = [[*tokenizer.encode_assistant(text), tokenizer.close_id] for text in ("7", "2")]
    assert [list(turn.completion.token_ids) for turn in first.turns] == said
    assert all(set(turn.completion.behavior_logprobs) == {engine.logprob} for turn in first.turns)
    assert first.policy_version == 5
    assert first.token_ids() == [*max(engine.prompts.values(), key=len), *said[1]]
    assert [m.content for m in first.messages] == ["Double it.", "Twice 1?", "7", "Twice 7?", "2"]


@on_the_workers_loop
async def test_an_empty_answer_is_the_models_doing_and_is_scored(
    make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer
) -> None:
    group, _ = await play(make_dialogue, ["3", ""], tokenizer)
    assert group.rewards_G == [0.0]


@on_the_workers_loop
async def test_a_full_context_is_scored_on_what_was_said(
    make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer
) -> None:
    group, _ = await play(make_dialogue, ["x" * 90, "2"], tokenizer, max_context=520)
    assert group.rewards_G == [0.0]
    assert group.trajectories[0].info["calls"] == 1


@on_the_workers_loop
async def test_its_infrastructure_is_ours(make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer) -> None:
    with pytest.raises(EnvError, match="InfraError: its sandbox is gone"):
        await play(make_dialogue, ["crash", "2"], tokenizer)


@on_the_workers_loop
async def test_a_rubric_that_fails_is_infrastructure_and_never_a_zero(
    make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer
) -> None:
    with pytest.raises(EnvError, match="its rubric failed: correct: RuntimeError: the judge has no key"):
        await play(make_dialogue, ["7", "2"], tokenizer, index=3)


@on_the_workers_loop
async def test_its_tools_are_called_and_the_history_only_grows(
    make_dialogue: Callable[[], Env], tokenizer: TurnTokenizer
) -> None:
    script = [call("add", a=2, b=2), call("add", a="x"), "5", "4"]
    group, _ = await play(make_dialogue, script, tokenizer, index=2)
    assert group.rewards_G == [1.0]
    (trajectory,) = group.trajectories
    assert trajectory.info["calls"] == 4
    shown = [message.content for message in trajectory.messages if message.role == "tool"]
    assert shown[0] == "4"
    assert "b" in shown[1]  # which is missing: the model is told


@on_the_workers_loop
async def test_a_rubric_that_scores_groups_is_refused(make_dialogue: Callable[[], Env]) -> None:
    worker = await make_dialogue().shared.process()
    with pytest.raises(EnvError, match=r"cannot be adapted: the rubric of .* scores groups of rollouts together"):
        await worker.ask("load", **{**make_dialogue().load, "args": {"grouped": True}})


def test_an_interpreter_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install verifiers==0\.3\.1"):
        load_env_class("verifiers:gsm8k", {"python": str(tmp_path / "python")})
