import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl import config
from agentrl.config import WrapperConfig
from agentrl.env import Action, Env, Episode, StepResult, ToolEnv, make, play_script
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import ConfigError, EnvError
from agentrl.tools import tool
from agentrl.types import Message, StopReason, Task, ToolCall, user
from agentrl.wrappers import RewardScale, TimeLimit, ToolBudget, Wrapper, load_wrappers

TASK = Task(id="t", prompt="Look.", answer="3")


class Looker(ToolEnv):
    max_turns = 6
    reward_weights: ClassVar = {"correct": 1.0, "brief": 0.5}
    was_closed = False

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def look(self, seconds: float = 0.0) -> str:
        """Look."""
        if seconds < 0:
            raise RuntimeError("broken")
        await asyncio.sleep(seconds)
        return "3"

    async def step(self, action: Action) -> StepResult:
        return (await super().step(action))._replace(reward=0.25)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer), "brief": 1.0}

    async def close(self) -> None:
        self.was_closed = True


def says(text: str, calls: int = 0, **arguments: object) -> Message:
    tool_calls = tuple(ToolCall(id=f"c{i}", name="look", arguments=arguments) for i in range(calls))
    return Message(role="assistant", content=text, tool_calls=tool_calls)


LOOKS_TWICE: Sequence[Message] = [says("", calls=1), says("", calls=1), says("3")]


async def test_a_bare_wrapper_changes_nothing() -> None:
    inside = Looker()
    env = Wrapper(Wrapper(inside))
    episode = await play_script(env, TASK, LOOKS_TWICE)
    assert episode.messages == (await play_script(Looker(), TASK, LOOKS_TWICE)).messages
    assert (episode.rewards, episode.reward) == ({"correct": 1.0, "brief": 1.0, "step": 0.75}, 2.25)
    assert inside.was_closed
    assert env.unwrapped is inside
    assert (env.tool_schemas(), env.max_turns) == (inside.tool_schemas(), 6)


async def test_turns_are_limited_and_the_end_is_truncated() -> None:
    env = TimeLimit(Looker(), turns=2)
    episode = await play_script(env, TASK, LOOKS_TWICE)
    assert (episode.stop_reason, len(episode.messages)) == (StopReason.TRUNCATED, 5)
    assert episode.info["time_limit"] == 1
    assert env.max_turns == 2


async def test_an_end_in_the_last_turn_allowed_is_no_truncation() -> None:
    episode = await play_script(TimeLimit(Looker(), turns=3), TASK, LOOKS_TWICE)
    assert (episode.stop_reason, "time_limit" in episode.info) == (StopReason.COMPLETED, False)


async def test_seconds_end_a_step_that_is_running() -> None:
    env = Looker()
    async with asyncio.timeout(5):
        episode = await play_script(TimeLimit(env, seconds=0.05), TASK, [says("", calls=1, seconds=60)])
    assert episode.stop_reason is StopReason.TRUNCATED
    assert env.was_closed


@pytest.mark.parametrize("scale", [2.0, {"correct": 2.0, "brief": 2.0, "step": 2.0}])
async def test_rewards_count_scaled_and_are_shown_as_they_are(scale: Any) -> None:
    episode = await play_script(RewardScale(Looker(), scale=scale), TASK, LOOKS_TWICE)
    assert (episode.rewards, episode.reward) == ({"correct": 1.0, "brief": 1.0, "step": 0.75}, 4.5)


async def test_a_reward_can_be_scaled_alone() -> None:
    episode = await play_script(RewardScale(Looker(), scale={"step": 0.0}), TASK, LOOKS_TWICE)
    assert episode.reward == 1.5


async def test_calls_beyond_the_budget_are_answered_and_counted() -> None:
    script = [says("", calls=1), says("", calls=2), says("", calls=1), says("3")]
    episode = await play_script(ToolBudget(Looker(), calls=2), TASK, script)
    answers = [message for message in episode.messages if message.role == "tool"]
    assert [message.content == "3" for message in answers] == [True, True, False, False]
    assert "budget of 2 tool calls is spent" in answers[-1].content
    assert [message.tool_call_id for message in answers] == ["c0", "c0", "c1", "c0"]
    assert (episode.info["tool_calls"], episode.info["tool_errors"], episode.info["refused_calls"]) == (4, 2, 2)
    assert episode.stop_reason is StopReason.COMPLETED


async def test_a_budget_is_new_for_every_episode() -> None:
    env = ToolBudget(Looker(), calls=1)
    for _ in range(2):
        assert "refused_calls" not in (await play_script(env, TASK, [says("", calls=1), says("3")])).info


async def test_answers_of_what_did_not_parse_stand_behind_those_of_calls() -> None:
    env = ToolBudget(Looker(), calls=1)
    await env.reset(task=TASK)
    result = await env.step(Action(message=says("", calls=2), parse_errors=("not closed",)))
    assert [message.tool_call_id for message in result.observation] == ["c0", "c1", None]


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (partial(TimeLimit), "give turns, seconds or both"),
        (partial(TimeLimit, turns=0), "must be positive"),
        (partial(ToolBudget, calls=-1), "must not be negative"),
        (partial(RewardScale, scale={"corect": 2.0}), "there is no reward 'corect'; rewards: brief, correct, step"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrap: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(Looker, wrappers=[wrap])


def test_wrappers_come_from_a_config_first_one_innermost(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl.wrappers import Wrapper\nclass Mine(Wrapper):\n    def __init__(self, env, *, colour):\n"
        "        super().__init__(env)\n        self.colour = colour\n"
    )
    text = (
        f"[{{TimeLimit: {{turns: 2}}}}, {{ToolBudget: {{calls: 1}}}}, {{'{tmp_path}/mine.py:Mine': {{colour: red}}}}]"
    )
    settings = config.load("configs/quickstart.yaml", [f"env.wrappers={text}"]).env.wrappers
    env: Any = make(Looker, wrappers=load_wrappers(settings))
    assert [type(env).__name__, type(env.env).__name__, type(env.env.env)] == ["Mine", "ToolBudget", TimeLimit]
    assert env.colour == "red"


@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("TimeLimits", {}, "TimeLimits is not a wrapper; known: RewardScale, TimeLimit, ToolBudget"),
        ("TimeLimit", {"turn": 3}, "does not take the arguments"),
        ("agentrl.wrappers:asyncio", {}, "is not a wrapper"),
        ("agentrl.wrappers:Nothing", {}, "does not exist"),
    ],
)
def test_a_wrapper_of_a_config_that_is_wrong_is_named(name: str, kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_wrappers([WrapperConfig(name=name, kwargs=kwargs)])


def test_an_agent_with_its_own_loop_cannot_be_wrapped() -> None:
    class Agent(AgentEnv):
        async def run(self, *, task: Task, endpoint: Endpoint) -> None:
            raise AssertionError("never run")

    with pytest.raises(ConfigError, match="Agent brings its own loop"):
        TimeLimit(Agent(), turns=1)


async def test_the_driver_sees_the_insides_failures_and_names() -> None:
    class Forgets(Looker):
        async def score(self, episode: Episode) -> dict[str, float]:
            return {"correct": 1.0}

    wrapped: Env = TimeLimit(ToolBudget(Forgets(), calls=9), turns=5)
    with pytest.raises(EnvError, match=r"Forgets.score did not return \['brief'\]"):
        await play_script(wrapped, TASK, LOOKS_TWICE)
