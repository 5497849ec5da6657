import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.env import (
    STEP_REWARD,
    Action,
    Env,
    Episode,
    Split,
    StepResult,
    ToolEnv,
    advance,
    attributed,
    load_env_class,
    make,
    play_script,
    register,
    spec,
    specs,
)
from agentrl.errors import ConfigError, EnvError, SandboxError
from agentrl.tools import tool
from agentrl.types import Message, StopReason, Task, ToolCall, user
from sandbox.client import SessionLost

TASK = Task(id="t", prompt="Add.", answer="3")


class Adder(ToolEnv):
    """Counts what happened to it."""

    max_turns = 4
    log: list[str]

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [TASK]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self.log = ["reset"]
        return [user(task.prompt)], {}

    @tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if b == 13:
            raise RuntimeError("unlucky")
        if b == 14:
            raise SessionLost("gone")
        if b == 15:
            await asyncio.sleep(60)
        if b == 16:
            return "half a pair: \ud800"
        return str(a + b)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.log.append("close")


class Game(Env):
    """All reward comes from step."""

    reward_weights: ClassVar = {STEP_REWARD: 2.0}

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user("go")], {}

    async def step(self, action: Action) -> StepResult:
        last = action.message.content == "stop"
        return StepResult([user("more")], 0.25, False, last, {})


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    tool_calls = tuple(ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(named))
    return Message(role="assistant", content="", tool_calls=tool_calls)


async def test_a_scripted_episode_is_played_scored_and_closed() -> None:
    env = Adder()
    episode = await play_script(env, TASK, [calls(("add", {"a": 1, "b": 2})), says("3")])
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2] == Message(role="tool", content="3", tool_call_id="c0")
    assert (episode.reward, episode.rewards, episode.stop_reason) == (1.0, {"correct": 1.0}, StopReason.COMPLETED)
    assert env.log == ["reset", "close"]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("sub", {}), "Error: there is no tool 'sub'; tools: add"),
        (("add", {"a": 1}), "Error: argument 'b' is missing"),
        (("add", {"a": 1, "b": "x"}), "Error: argument 'b': should be a valid integer"),
        (("score", {}), "Error: there is no tool 'score'"),
    ],
)
async def test_a_call_that_makes_no_sense_is_answered_and_counted(
    call: tuple[str, dict[str, Any]], answer: str
) -> None:
    result = await Adder().step(Action(message=calls(call)))
    assert result.observation[0].content.startswith(answer)
    assert not result.terminated
    assert (result.info["tool_calls"], result.info["tool_errors"]) == (1, 1)


async def test_a_turn_that_did_not_parse_is_answered_not_ended() -> None:
    result = await Adder().step(Action(message=says("<tool_call>"), parse_errors=("not closed",)))
    assert [m.content for m in result.observation] == ["Error: not closed"]
    assert not result.terminated


async def test_tool_output_that_is_no_text_is_made_text() -> None:
    result = await Adder().step(Action(message=calls(("add", {"a": 1, "b": 16}))))
    assert result.observation[0].content == "half a pair: ?"


async def test_parallel_calls_are_answered_in_order_up_to_the_cap() -> None:
    result = await Adder().step(Action(message=calls(*[("add", {"a": i, "b": 0}) for i in range(5)])))
    assert [m.content for m in result.observation[:4]] == ["0", "1", "2", "3"]
    assert "at most 4 tool calls" in result.observation[4].content


@pytest.mark.parametrize(("b", "error"), [(13, EnvError), (14, SandboxError)])
async def test_a_failing_tool_is_attributed_and_closed_never_scored(b: int, error: type[Exception]) -> None:
    env = Adder()
    with pytest.raises(error, match="tool add"):
        await play_script(env, TASK, [calls(("add", {"a": 1, "b": b}))])
    assert env.log[-1] == "close"


async def test_cancelling_an_episode_closes_it() -> None:
    env = Adder()
    episode = asyncio.create_task(play_script(env, TASK, [calls(("add", {"a": 1, "b": 15}))]))
    await asyncio.sleep(0.05)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert env.log[-1] == "close"


async def test_step_rewards_are_summed_under_their_own_name_and_weight() -> None:
    episode = await play_script(Game(), TASK, [says("on"), says("stop"), says("never")])
    assert (episode.rewards, episode.reward) == ({"step": 0.5}, 1.0)
    assert episode.stop_reason is StopReason.TRUNCATED


async def test_a_script_that_runs_out_ends_as_max_turns() -> None:
    assert (await play_script(Game(), TASK, [says("on")])).stop_reason is StopReason.MAX_TURNS


@pytest.mark.parametrize(
    ("scores", "reason"),
    [({"correct": 1.0, "style": 1.0}, "'style'"), ({"correct": float("nan")}, "finite"), ({}, r"did not return")],
)
async def test_a_wrong_set_of_rewards_is_an_error(scores: dict[str, float], reason: str) -> None:
    class Odd(Adder):
        async def score(self, episode: Episode) -> dict[str, float]:
            return scores

    with pytest.raises(EnvError, match=reason):
        await play_script(Odd(), TASK, [says("3")])


@pytest.mark.parametrize(
    "result",
    [StepResult([user("x")], float("inf"), False, False, {}), StepResult([], 0.0, False, False, {})],
)
async def test_a_step_result_that_cannot_be_used_is_an_error(result: StepResult) -> None:
    class Odd(Game):
        async def step(self, action: Action) -> StepResult:
            return result

    with pytest.raises(EnvError, match="step returned"):
        await advance(Odd(), Action(message=says("x")))


def test_a_failure_is_attributed_once() -> None:
    with pytest.raises(SandboxError, match="inner") as caught, attributed("outer"):
        raise SandboxError("inner")
    assert "outer" not in str(caught.value)


def test_using_a_sandbox_that_was_not_given_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="Adder runs code, but no sandbox"):
        _ = make(Adder).sandbox


def test_a_class_is_found_by_module_file_and_id(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from agentrl.env import ToolEnv\nfrom agentrl.tools import tool\n"
        "class Mine(ToolEnv):\n"
        "    async def reset(self, *, task, seed=None):\n        return [], {}\n"
        "    @tool\n    async def look(self, where: str) -> str:\n        'Look.'\n        return where\n"
    )
    target = f"{tmp_path}/mine.py:Mine"
    assert load_env_class(target) is load_env_class(target)
    assert list(load_env_class(target).tools) == ["look"]
    assert load_env_class("envs.aime:AimePython") is load_env_class("AimePython-v0")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("AimePyton-v0", "did you mean 'AimePython-v0'"),
        ("envs.aime:AimePyton", "did you mean 'AimePython'"),
        ("envs.aimee:AimePython", "no module 'envs.aimee'"),
        ("nowhere/env.py:Mine", "no file nowhere/env.py"),
        ("agentrl.env:ToolEnv", "abstract: it does not define reset"),
        ("agentrl.env:make", "not an Env class"),
    ],
)
def test_a_target_that_is_not_there_says_what_is(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_env_class(target)


def test_a_file_that_does_not_load_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1/0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_env_class(f"{tmp_path}/bad.py:Bad")


def test_an_id_is_taken_once() -> None:
    register("TestAdder-v0")(Adder)
    with pytest.raises(ConfigError, match="is taken by"):
        register("TestAdder-v0")(Game)
    assert load_env_class("TestAdder-v0") is Adder


def test_constructor_arguments_that_do_not_fit_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot make Adder"):
        make(Adder, colour="red")


class Sized(Adder):
    """Takes an argument."""

    def __init__(self, *, size: int = 1) -> None:
        self.size = size


def test_an_id_carries_arguments_which_a_config_and_make_override() -> None:
    register("TestSized-v0", kwargs={"size": 2})(Sized)
    register("TestSized-v1", f"{__name__}:Sized", kwargs={"size": 3})
    sizes = [
        make("TestSized-v0"),
        make("TestSized-v1"),
        make(load_env_class("TestSized-v1", {"size": 4})),
        make("TestSized-v1", size=5),
        make(Sized),
    ]
    assert [env.size for env in sizes if isinstance(env, Sized)] == [2, 3, 4, 5, 1]
    assert load_env_class("TestSized-v1", {"size": 4}).kwargs == {"size": 4}
    assert spec("TestSized-v1").entry_point == f"{__name__}:Sized"


def test_arguments_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match=r"Sized does not take the arguments \{'colour': 'red'\}"):
        load_env_class(f"{__name__}:Sized", {"colour": "red"})


def test_shipped_environments_are_listed_and_specified() -> None:
    assert {"AimePython-v0", "ModMath-v0"} <= {known.id for known in specs()}
    assert spec("AimePython-v0").load() is load_env_class("envs.aime:AimePython")
    with pytest.raises(ConfigError, match="did you mean 'ModMath-v0'"):
        spec("ModMaths-v0")


def test_a_file_registers_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl.env import Env, register\n"
        "@register('TestMine-v0')\nclass Mine(Env):\n"
        "    async def reset(self, *, task, seed=None): ...\n    async def step(self, action): ...\n"
    )
    found = load_env_class(f"{tmp_path}/mine.py:Mine")
    assert spec("TestMine-v0").entry_point == f"{tmp_path}/mine.py:Mine"
    assert load_env_class("TestMine-v0") is found


def test_a_file_may_import_its_neighbour_which_is_loaded_by_path_too(tmp_path: Path) -> None:
    body = "    async def reset(self, *, task, seed=None): ...\n    async def step(self, action): ...\n"
    (tmp_path / "test_neighbour.py").write_text(
        f"from agentrl.env import Env, register\n@register('TestNeighbour-v0')\nclass Near(Env):\n{body}"
    )
    (tmp_path / "test_importer.py").write_text("from test_neighbour import Near\nclass Far(Near): ...\n")
    near = load_env_class(f"{tmp_path}/test_neighbour.py:Near")
    far = load_env_class(f"{tmp_path}/test_importer.py:Far")
    assert near.__name__ == far.__mro__[1].__name__ == "Near"
