"""Environments played over OpenAI-compatible endpoints: our own proxy, stock vLLM, and servers that refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from openai import AsyncOpenAI

from agentrl.chat import endpoint_speaker
from agentrl.chat.chat_model import ChatModel, PromptTooLong
from agentrl.chat.proxy import ChatProxy
from agentrl.chat.runners import EndpointRunners
from agentrl.chat.token_session import TokenSession
from agentrl.config import RolloutConfig
from agentrl.env import Action, Env, Episode, Split, StepResult, ToolEnv
from agentrl.env.agent_env import AgentEnv, Endpoint
from agentrl.errors import ConfigError, EngineError, EngineGone, EnvError, SandboxError
from agentrl.report.statistics import summarize
from agentrl.rollouts.generation import TokenGenerator
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import RolloutSettings
from agentrl.supervision.serving import serving
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.tools import tool
from agentrl.types import Message, Sampling, StopReason, Task, TrajectoryGroup, user
from sandbox.client import SandboxUnavailable

if TYPE_CHECKING:
    from tests.conftest import VLLMServer

TASK = Task(id="t", prompt="What is it?", answer="7")
LIMITS = RolloutConfig(max_context=800, max_turn_tokens=100, tool_output_tokens=50, episode_timeout_s=20, max_retries=1)

Connect = Callable[..., AbstractAsyncContextManager[ChatModel]]


def model_at(url: str, **options: Any) -> ChatModel:
    return ChatModel(
        url,
        **{"model": "policy", "api_key": None, "api_key_name": "MY_KEY", "request_timeout_s": 20, "max_retries": 0}
        | options,
    )


class Looking(ToolEnv):
    """Has a tool that answers with what it is told."""

    max_turns = 4
    closed = 0
    fail = ""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [TASK]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    @tool
    async def look(self, at: str) -> str:
        """Look."""
        if self.fail == "tool":
            raise SandboxUnavailable("down")
        return at

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def scripted(tokenizer: TurnTokenizer) -> Connect:
    """A model that follows a script, behind real HTTP in OpenAI's format."""

    @asynccontextmanager
    async def connected(script: Any, **limits: Any) -> AsyncIterator[ChatModel]:
        engine = ScriptedEngine(tokenizer=tokenizer, script=script)
        hermes = tokenizer.with_tool_format("hermes")
        session = TokenSession(
            TokenGenerator(engine, hermes, session_id="x", seed=None),
            tokenizer=hermes,
            config=LIMITS.model_copy(update=limits),
            sampling=Sampling(max_tokens=100, stop_token_ids=tokenizer.stop_token_ids),
            max_calls=1000,
        )
        async with (
            ChatProxy().session(session) as endpoint,
            model_at(endpoint.base_url, api_key=endpoint.api_key) as model,
        ):
            yield model

    return connected


async def play(
    model: ChatModel,
    make_env: Callable[[], Env] = Looking,
    *,
    size: int = 1,
    max_turns: int | None = None,
    **limits: Any,
) -> TrajectoryGroup:
    config = LIMITS.model_copy(update={"group_size": size, **limits})
    settings = RolloutSettings(config=config, max_turns=max_turns, backoff_s=0.001)
    return await GroupPlayer(make_env, {"eval": settings}, EndpointRunners()).play_group(model, 0, TASK, kind="eval")


async def test_an_environment_is_played_in_message_space(scripted: Connect) -> None:
    envs: list[Looking] = []
    async with scripted([call("look", at="é ∑"), "7"]) as model:
        group = await play(model, lambda: envs.append(Looking()) or envs[-1])
    (episode,) = group.trajectories
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    assert [(m.role, m.content) for m in episode.messages[2:]] == [("tool", "é ∑"), ("assistant", "7")]
    assert episode.messages[2].tool_call_id == episode.messages[1].tool_calls[0].id
    assert [env.closed for env in envs] == [1]


async def test_no_tokens_are_invented_and_the_numbers_come_out(scripted: Connect) -> None:
    async with scripted(lambda prompt: "7") as model:
        group = await play(model, size=4)
    assert all(episode.turns == () and episode.info["turns"] == 1 for episode in group.trajectories)
    assert all(episode.info["completion_tokens"] == 2 for episode in group.trajectories)
    result = summarize([group], policy_version=0)
    assert (result.n, result.avg, result.pass_at[4].value) == (4, 1.0, 1.0)


class Outside(AgentEnv):
    """Somebody else's loop for the same task."""

    script = ("", "")

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        history: list[Any] = [{"role": "user", "content": task.prompt}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for more in self.script:
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=history, tools=Looking.tool_schemas(), stop=["never"]
                )
                message = answer.choices[0].message
                history.append(message)
                for wanted in message.tool_calls or ():
                    history.append({"role": "tool", "content": "seen", "tool_call_id": wanted.id})
                if more:
                    history.append({"role": "user", "content": more})

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(episode.final_text == episode.task.answer)}


async def test_somebody_elses_agent_is_measured_too(scripted: Connect) -> None:
    async with scripted([call("look", at="x"), "7"]) as model:
        (episode,) = (await play(model, Outside)).trajectories
    assert (episode.id, episode.reward, episode.turns, episode.info["turns"]) == ("eval-0-0", 1.0, (), 2)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]


async def test_the_end_of_the_endpoint_is_no_failure_of_the_agents(scripted: Connect) -> None:
    class Talking(Outside):
        script = ("word " * 40,) * 20

    async with scripted(lambda prompt: "7", max_context=600) as model:
        (episode,) = (await play(model, Talking)).trajectories
        assert (episode.stop_reason, episode.reward) == (StopReason.MAX_CONTEXT, 1.0)
    async with scripted(["7"]) as model:
        with pytest.raises(EngineError, match="failed, 1 times"):
            await play(model, Talking)
    async with endpoint(lambda sent: (401, refusal("bad key"))) as (url, _), model_at(url) as model:
        with pytest.raises(ConfigError, match="set MY_KEY"):
            await play(model, Talking)


async def test_malformed_calls_are_observations(scripted: Connect) -> None:
    async with scripted(["<tool_call>{", call("look", at="x"), "7"]) as model:
        (episode,) = (await play(model)).trajectories
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert (episode.reward, episode.info["tool_errors"]) == (1.0, 1)


async def test_long_tool_output_is_cut(scripted: Connect) -> None:
    async with scripted([call("look", at="x" * 60), "7"]) as model:
        (episode,) = (await play(model, tool_output_tokens=12)).trajectories
    shown = next(m.content for m in episode.messages if m.role == "tool")
    assert len(shown) <= 12 * endpoint_speaker.CHARACTERS_PER_TOKEN
    assert "cut" in shown


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_turn_tokens": 5}, StopReason.MAX_TURN_TOKENS),
        ({"max_context": 450}, StopReason.MAX_CONTEXT),
    ],
)
async def test_the_runs_limits_hold(scripted: Connect, limits: dict[str, int], reason: StopReason) -> None:
    async with scripted(lambda prompt: call("look", at="once more with feeling")) as model:
        (episode,) = (await play(model, **limits)).trajectories
    assert (episode.stop_reason, episode.reward) == (reason, 0.0)


async def test_a_conversation_that_outgrows_the_model_ends(scripted: Connect) -> None:
    async with scripted(lambda prompt: call("look", at="once more with feeling"), max_context=450) as model:
        (episode,) = (await play(model)).trajectories
    assert episode.stop_reason is StopReason.MAX_CONTEXT
    async with scripted(["7"], max_context=60) as model:
        with pytest.raises(ConfigError, match="does not fit the model"):
            await play(model)


async def test_what_fails_is_tried_again_and_never_scored(scripted: Connect) -> None:
    async with scripted(lambda prompt: call("look", at="x") if "tool_response" not in prompt[200:] else "7") as model:
        first, second = Looking(), Looking()
        first.fail = "tool"
        tries = iter([first, second])
        assert (await play(model, lambda: next(tries))).rewards_G == [1.0]
        assert (first.closed, second.closed) == (1, 1)

        class Down(Looking):
            fail = "tool"

        with pytest.raises(SandboxError):
            await play(model, Down)


async def test_an_environment_that_hangs_ends_by_the_clock(scripted: Connect) -> None:
    class Stuck(Looking):
        async def step(self, action: Any) -> StepResult:
            await asyncio.sleep(60)
            raise AssertionError

    class NoStart(Looking):
        async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
            await asyncio.sleep(60)
            raise AssertionError

    async with scripted(lambda prompt: "7") as model:
        assert (await play(model, Stuck, episode_timeout_s=0.5)).trajectories[0].stop_reason is StopReason.TIMEOUT
        with pytest.raises(EnvError, match="reset of task t took more than"):
            await play(model, NoStart, episode_timeout_s=0.5)


@asynccontextmanager
async def endpoint(
    reply: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]],
) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server with behaviour of its own; also every body it was sent."""
    app, seen = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> JSONResponse:
        seen.append(await request.json())
        status, body = reply(seen[-1])
        return JSONResponse(body, status_code=status, headers={"connection": "close"})

    async with serving(app, host="127.0.0.1", port=0) as url:
        yield f"{url}/v1", seen


def refusal(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


def answer(**message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


async def say(model: ChatModel) -> Any:
    return await model.say([user("hello")], (), max_tokens=9, temperature=1.0, top_p=1.0)


@pytest.mark.parametrize(
    ("status", "body", "error", "reason"),
    [
        (401, refusal("bad key"), ConfigError, "set MY_KEY"),
        (404, refusal("no model"), ConfigError, "served name"),
        (400, refusal("--enable-auto-tool-choice and --tool-call-parser must be set"), ConfigError, "start vLLM with"),
        (400, refusal("nonsense"), ConfigError, "nonsense"),
        (400, refusal("too long", code="context_length_exceeded"), PromptTooLong, "too long"),
        (429, refusal("slow down"), EngineError, "slow down"),
        (500, refusal("broken"), EngineError, "broken"),
        (200, {**answer(), "choices": []}, EngineError, "without a choice"),
    ],
)
async def test_refusals_are_told_with_the_mend(status: int, body: Any, error: Any, reason: str) -> None:
    async with endpoint(lambda sent: (status, body)) as (url, _), model_at(url) as model:
        with pytest.raises(error, match=reason):
            await say(model)


async def test_a_busy_endpoint_is_asked_again() -> None:
    replies = iter([(429, refusal("slow down")), (503, refusal("starting")), (200, answer(content="7"))])
    async with endpoint(lambda sent: next(replies)) as (url, _), model_at(url, max_retries=2) as model:
        assert (await say(model)).message.content == "7"


async def test_nothing_there_is_told_before_anything_is_asked() -> None:
    with pytest.raises(EngineGone, match=r"127\.0\.0\.1:9/v1 does not answer: .*; does the server run\?"):
        async with model_at("http://127.0.0.1:9/v1"):
            pass


async def test_models_with_other_names_for_the_limit_and_without_knobs_are_served_too() -> None:
    def picky(sent: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        for name in ("max_tokens", "temperature", "top_p"):
            if name in sent:
                return 400, refusal(f"{name}?", code="unsupported_parameter", param=name)
        return 200, answer(content="7")

    async with endpoint(picky) as (url, seen), model_at(url) as model:
        for _ in range(2):
            assert (await say(model)).message.content == "7"
        assert seen[-1].keys() == {"model", "messages", "max_completion_tokens"}
        with pytest.raises(ConfigError, match=r"temperature\?"):
            await ChatModel.say(model_at(url), [user("x")], (), max_tokens=9, temperature=0.5, top_p=1.0)


async def test_arguments_that_are_no_json_are_an_error_the_model_sees() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}]
    replies = iter([answer(tool_calls=calls), answer(content="7")])
    async with endpoint(lambda sent: (200, next(replies))) as (url, seen), model_at(url) as model:
        (episode,) = (await play(model)).trajectories
    assert episode.info["tool_errors"] == 1
    assert "not JSON" in seen[1]["messages"][-1]["content"]
    assert seen[1]["messages"][-1]["role"] == "user"


class Plain(Env):
    """One turn without a tool."""

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        return StepResult([], float(action.message.content == "7"), True, False, {})


@pytest.mark.engine
async def test_stock_vllm_is_measured_and_says_what_it_lacks_for_tools(vllm_server: VLLMServer) -> None:
    async with model_at(f"{vllm_server.url}/v1", model=vllm_server.model) as model:
        group = await play(model, Plain, size=3)
        assert all(0 < episode.info["completion_tokens"] <= 400 for episode in group.trajectories)
        assert summarize([group], policy_version=0).avg == 0.0
        with pytest.raises(ConfigError, match="--tool-call-parser hermes"):
            await play(model, Looking)
        with pytest.raises(PromptTooLong):
            await model.say([user("word " * 2000)], (), max_tokens=9, temperature=1.0, top_p=1.0)
    async with model_at(f"{vllm_server.url}/v1", model="another") as model:
        with pytest.raises(ConfigError, match="served name"):
            await say(model)
