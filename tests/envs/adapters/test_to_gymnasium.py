"""Our environments as Gymnasium's: its own checker, its vectors, and rewards that sum to the episode's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from agentrl.env import Env, Episode, StepResult, ToolEnv
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import ConfigError, EnvError
from agentrl.testing import call
from agentrl.tokens.tool_calls import format_message
from agentrl.tools import tool
from agentrl.types import Message, Task, user
from envs.adapters.to_gymnasium import TextEnv, to_gymnasium
from envs.adapters.unicode_space import UnicodeText
from envs.modmath import ModMath
from sandbox.client import SandboxClient


class Adding(ToolEnv):
    """Adds numbers; pays for the right sum, and 0.1 for each step through `step`."""

    max_turns = 3
    num_closed = 0

    @classmethod
    def tasks(cls, split: Any, *, data: str | None = None, seed: int = 0) -> Iterator[Task]:
        first = seed * 1000 if split == "train" else 0
        return (Task(id=str(i), prompt=f"{i} + {i} — ∑?", answer=str(2 * i)) for i in range(first, first + 20))

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a < 0:
            raise RuntimeError("broken")
        return str(a + b)

    async def step(self, action: Any) -> StepResult:
        return (await super().step(action))._replace(reward=0.1)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}

    async def close(self) -> None:
        Adding.num_closed += 1


@pytest.fixture
def adding() -> Iterator[TextEnv]:
    env = to_gymnasium(Adding, split="test", render_mode="ansi")
    yield env
    env.close()


@pytest.mark.parametrize("target", [Adding, ModMath, "gymnasium:FrozenLake-v1", "ModMath-v0"])
def test_gymnasiums_own_checker_passes_without_a_warning(target: type[Env] | str) -> None:
    env = to_gymnasium(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    env.close()


def test_the_rewards_of_the_steps_sum_to_the_episodes(adding: TextEnv) -> None:
    observation, info = adding.reset(options={"index": 4})
    assert observation == "4 + 4 — ∑?"
    assert info["messages"] == [{"role": "user", "content": observation}]
    asked = adding.step(format_message(call("add", a=4, b=4)))
    assert asked[:4] == ("8", pytest.approx(0.1), False, False)
    assert asked[4]["tool_calls"] == 1
    observation, reward, terminated, truncated, info = adding.step("8")
    assert (observation, reward, terminated, truncated) == ("", pytest.approx(1.1), True, False)
    assert info["rewards"] == {"correct": 1.0, "step": pytest.approx(0.2)}
    assert adding.render() == "\n".join(["user: 4 + 4 — ∑?", "assistant: ", "tool: 8", "assistant: 8"])


def test_the_turn_budget_truncates_and_no_step_follows_the_end(adding: TextEnv) -> None:
    adding.reset(seed=1)
    ends = [adding.step(format_message(call("add", a=1, b=1)))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded):
        adding.step("2")


def test_infrastructure_raises_and_the_next_episode_is_well(adding: TextEnv) -> None:
    adding.reset(seed=1)
    with pytest.raises(EnvError, match="broken"):
        adding.step(format_message(call("add", a=-1, b=1)))
    with pytest.raises(gymnasium.error.ResetNeeded):
        adding.step("2")
    observation, _ = adding.reset(options={"index": 1})
    assert observation == "1 + 1 — ∑?"


def test_every_episode_is_closed_also_an_abandoned_one() -> None:
    before = Adding.num_closed
    env = to_gymnasium(Adding)
    for _ in range(3):
        env.reset()
    env.close()
    env.close()
    assert Adding.num_closed - before == 3


def test_the_sandbox_is_opened_in_the_environments_own_loop() -> None:
    env = to_gymnasium(ModMath, split="test", sandbox=SandboxClient.embedded)
    env.reset(seed=1)
    observation, *_ = env.step(format_message(call("python", code="print(6 * 7)")))
    env.close()
    assert observation.strip() == "42"


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_vectors_play_with_any_text(vector: Any) -> None:
    envs = vector([lambda: to_gymnasium(Adding, split="test", max_chars=200) for _ in range(2)])
    try:
        observations, _ = envs.reset(seed=[1, 2], options={"index": 5})
        assert observations == ("5 + 5 — ∑?",) * 2
        asked = format_message(call("add", a=2, b=3))
        observations, rewards, terminated, truncated, _ = envs.step((asked, "10"))
        assert observations == ("5", "")
        assert rewards.tolist() == pytest.approx([0.1, 1.1])
        assert (terminated.tolist(), truncated.tolist()) == ([False, True], [False, False])
    finally:
        envs.close()


def test_a_game_plays_in_a_vector_to_its_end() -> None:
    envs = SyncVectorEnv([lambda: to_gymnasium("gymnasium:CliffWalking-v1") for _ in range(2)])
    try:
        envs.reset(seed=0)
        total = sum(envs.step((move, move))[1] for move in ["up", *["right"] * 11, "down"])
        assert total.tolist() == [-13.0, -13.0]
    finally:
        envs.close()


def test_a_text_space_holds_any_text() -> None:
    space = UnicodeText(8, seed=1)
    assert all(space.contains(space.sample()) for _ in range(20))
    assert space.contains("日本語 🙂")
    assert not space.contains("x" * 9)
    assert not space.contains(3)


def test_an_agent_has_no_steps_to_call() -> None:
    with pytest.raises(ConfigError, match="has its own loop"):
        to_gymnasium(AgentEnv)
