"""Environments of a real OpenEnv server, which runs in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import env as environments
from agentrl.check import check_env
from agentrl.config import RolloutConfig
from agentrl.env import Action, Env, load_env_class, play_script
from agentrl.errors import ConfigError, EnvError
from agentrl.supervision.serving import free_port
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import ToolError
from agentrl.types import Message, StopReason, Task
from envs.adapters.from_openenv import OpenEnv, from_openenv
from tests.agentrl.rollouts.playing import play_group
from tests.envs.adapters.side_venv import python_of

SERVER = Path(__file__).with_name("openenv_server.py")


def says(*texts: str) -> list[Message]:
    return [Message(role="assistant", content=text) for text in texts]


def task(seed: int) -> Task:
    return Task(id="t", prompt="", metadata={"seed": seed})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = python_of("openenv", imports=f"import runpy; runpy.run_path({str(SERVER)!r}, run_name='server')")
    port = free_port()
    log = tmp_path_factory.mktemp("openenv") / "log"
    with log.open("wb") as output:
        server = subprocess.Popen([python, SERVER, str(port)], stdout=output, stderr=output)
    try:
        for _ in range(1200):
            assert server.poll() is None, log.read_text()[-2000:]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


async def test_an_action_of_one_text_is_the_message(url: str) -> None:
    guess = from_openenv(f"{url}/guess", instructions="A game.")
    assert guess.tools == {}
    episode = await play_script(guess(), task(7), says("3", "7"))
    assert [m.content for m in episode.messages] == ["Guess a digit.", "3", "No.", "7", "Right!"]
    assert (episode.reward, episode.stop_reason) == (0.75, StopReason.COMPLETED)


async def test_a_typed_action_is_a_tool_with_its_schema(url: str) -> None:
    grid = from_openenv(f"ws{url.removeprefix('http')}/grid")
    (schema,) = grid.tool_schemas()
    assert schema["function"]["description"] == "Walk on the grid."
    properties = schema["function"]["parameters"]["properties"]
    assert list(properties) == ["dx", "dy"]
    assert (properties["dx"]["minimum"], properties["dx"]["description"]) == (-1, "to the right")
    script = [call("act", dx=1), call("act", dx=9), call("act", dx=1, dy=0)]
    episode = await play_script(grid(), task(0), script)
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    shown = [m.content for m in episode.messages if m.role == "tool"]
    assert shown == ["x: 1\ny: 0", "Error: argument 'dx': 9 is greater than the maximum of 1", "x: 2\ny: 0"]
    assert episode.info["tool_errors"] == 1


async def test_tools_behind_mcp_are_the_models_tools(url: str) -> None:
    tools = load_env_class(f"openenv:{url}/tools")
    assert list(tools.tools) == ["add", "fail"]
    script = [call("add", a=2, b=40), call("fail", reason="because"), *says("42")]
    episode = await play_script(tools(), task(0), script)
    shown = [m.content for m in episode.messages if m.role == "tool"]
    assert shown[0] == "42"
    assert shown[1].startswith("Error: ")
    assert "because" in shown[1]
    assert (episode.stop_reason, episode.info["tool_errors"]) == (StopReason.COMPLETED, 1)


async def test_a_full_server_is_waited_for_and_places_come_back(url: str) -> None:
    # Two places, six episodes at once: each must end its session for the others to come in.
    guess = from_openenv(f"{url}/small", connect_timeout_s=30)
    episodes = await asyncio.gather(*[play_script(guess(), task(n), says(str(n))) for n in range(6)])
    assert [episode.reward for episode in episodes] == [1.0] * 6


async def test_a_server_that_stays_full_is_infrastructure(url: str) -> None:
    guess = from_openenv(f"{url}/small", connect_timeout_s=1.0)
    sitting: list[Env] = [guess(), guess()]
    try:
        for env in sitting:
            await environments.start(env, task(1), 0)
        with pytest.raises(EnvError, match=r"had no free session within 1 s"):
            await play_script(guess(), task(1), says("1"))
    finally:
        for env in sitting:
            await environments.close(env)


async def test_a_step_that_fails_on_the_server_is_infrastructure(url: str) -> None:
    guess = from_openenv(f"{url}/guess")
    with pytest.raises(EnvError, match=r"the game is broken \(EXECUTION_ERROR\)"):
        await play_script(guess(), task(1), says("crash"))


async def test_what_the_server_refuses_is_an_observation(url: str) -> None:
    grid = from_openenv(f"{url}/grid")
    env = grid()
    try:
        await environments.start(env, task(0), 0)
        with pytest.raises(ToolError, match="dx"):
            await env.act({"dx": "far"})
    finally:
        await environments.close(env)


async def test_rows_of_a_file_reach_the_servers_reset(url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "Play!", "seed": 4, "hint": "It is even."}\n')
    guess = from_openenv(f"{url}/guess")
    (row,) = guess.tasks("train", data=str(rows))
    episode = await play_script(guess(), row, says("4"))
    assert episode.messages[0].content == "Play!\n\nGuess a digit. It is even."
    assert episode.reward == 1.0


@pytest.mark.parametrize("path", ["guess", "grid", "tools"])
async def test_our_check_passes(url: str, path: str) -> None:
    env_class = load_env_class(f"openenv:{url}/{path}", {"num_test_tasks": 2, "instructions": "Play."})
    report = await check_env(env_class, data=None, sandbox=None)
    assert [check for check in report.checks if not check.ok] == []


async def test_a_group_is_rolled_out_token_by_token(url: str, tokenizer: TurnTokenizer) -> None:
    guess = from_openenv(f"{url}/guess", instructions="A game.")
    row = next(iter(guess.tasks("train")))
    digit = str(row.metadata["seed"] % 10)
    group = await play_group(
        guess,
        row,
        group_id=0,
        size=2,
        engine=ScriptedEngine(tokenizer=tokenizer, script=["x", digit]),
        tokenizer=tokenizer,
        config=RolloutConfig(max_context=600, max_turn_tokens=50),
    )
    assert group.rewards_G == [0.75, 0.75]
    assert all(len(t.turns) == 2 for t in group.trajectories)


def test_the_package_is_not_in_our_environment() -> None:
    import importlib.util

    assert importlib.util.find_spec("openenv") is None


@pytest.mark.parametrize(
    ("target", "said"),
    [("openenv:nowhere", "is not a URL"), ("openenv:http://127.0.0.1:9", r"no OpenEnv server answers at http")],
)
def test_a_server_that_is_not_there_is_a_config_error(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_env_class(target)


async def test_a_connection_that_breaks_is_infrastructure(url: str) -> None:
    guess = from_openenv(f"{url}/guess")
    env: Any = guess()
    assert isinstance(env, OpenEnv)
    try:
        await environments.start(env, task(1), 0)
        await env._session._client.close()
        with pytest.raises(EnvError, match="gone during step"):
            await environments.advance(env, Action(message=says("1")[0]))
    finally:
        await environments.close(env)
