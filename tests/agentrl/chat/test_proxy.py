"""The proxy as agents see it: OpenAI's own client, over real HTTP, in front of an engine that follows a script."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from agentrl.chat.proxy import ChatProxy
from agentrl.chat.token_session import TokenSession
from agentrl.config import RolloutConfig
from agentrl.env.agent_env import Endpoint
from agentrl.errors import EngineError
from agentrl.rollouts.generation import TokenGenerator
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, FinishReason, Sampling, StopReason

LIMITS = RolloutConfig(max_context=600, max_turn_tokens=100)
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HELLO: Any = [{"role": "user", "content": "hello"}]

Serve = Callable[..., AbstractAsyncContextManager[tuple[AsyncOpenAI, TokenSession]]]


def client_of(endpoint: Endpoint, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=20, **options)


@pytest.fixture
def session(tokenizer: TurnTokenizer) -> Callable[..., TokenSession]:
    def make(
        script: Any = (), *, engine: Any = None, max_calls: int = 20, limits: RolloutConfig = LIMITS
    ) -> TokenSession:
        engine, hermes = (
            engine or ScriptedEngine(tokenizer=tokenizer, script=script),
            tokenizer.with_tool_format("hermes"),
        )
        return TokenSession(
            TokenGenerator(engine, hermes, session_id="e-0", seed=None),
            tokenizer=hermes,
            config=limits,
            sampling=Sampling(max_tokens=limits.max_turn_tokens, stop_token_ids=tokenizer.stop_token_ids),
            max_calls=max_calls,
        )

    return make


@pytest.fixture
def serve(session: Callable[..., TokenSession]) -> Serve:
    @asynccontextmanager
    async def serving(*args: Any, **options: Any) -> AsyncIterator[tuple[AsyncOpenAI, TokenSession]]:
        chat = session(*args, **options)
        async with ChatProxy().session(chat) as endpoint, client_of(endpoint) as client:
            yield client, chat

    return serving


async def ask(client: AsyncOpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def test_an_agent_is_answered_and_recorded(serve: Serve) -> None:
    async with serve([call("look"), "It is 7."]) as (client, chat):
        first = await ask(client, tools=[TOOL])
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.choices[0].message.tool_calls[0].function.name == "look"
        answered = {"role": "tool", "content": "7", "tool_call_id": first.choices[0].message.tool_calls[0].id}
        second = await ask(client, [*HELLO, first.choices[0].message, answered], tools=[TOOL])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 7.", "stop")
        (segment,) = chat.store.segments
        assert len(segment.turns) == 2
        assert second.usage.total_tokens == len(segment.token_ids)
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_stream_says_the_same(serve: Serve) -> None:
    async with serve(["It is 7.", call("look")]) as (client, chat):
        stream = await ask(client, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert (text, chunks[-1].usage.completion_tokens) == (
            "It is 7.",
            len(chat.store.segments[0].turns[0].completion.token_ids),
        )
        async with client.chat.completions.stream(model="any", messages=HELLO, tools=[TOOL]) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.name == "look"


async def test_calls_at_once_are_recorded_each_for_itself(serve: Serve, tokenizer: TurnTokenizer) -> None:
    engine = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "the same", latency_s=0.05)
    async with serve(engine=engine) as (client, chat):
        await asyncio.gather(*(ask(client) for _ in range(8)))
        assert [len(segment.turns) for segment in chat.store.segments] == [1] * 8
        assert len(engine.prompts) == 8


async def test_sessions_do_not_mix_and_the_server_stops_with_the_last(session: Callable[..., TokenSession]) -> None:
    proxy = ChatProxy()
    one, two = session(["one"]), session(["two"])
    async with proxy.session(one) as first:
        async with proxy.session(two) as second, client_of(second) as client:
            assert (await ask(client)).choices[0].message.content == "two"
            assert first.base_url.split("/")[2] == second.base_url.split("/")[2]
            async with AsyncOpenAI(base_url=first.base_url, api_key=second.api_key, max_retries=0) as thief:
                with pytest.raises(openai.AuthenticationError):
                    await ask(thief)
        async with client_of(second) as late:
            with pytest.raises(openai.AuthenticationError, match="the episode may be over"):
                await ask(late)
        async with client_of(first) as client:
            assert (await ask(client)).choices[0].message.content == "one"
    async with client_of(first) as late:
        with pytest.raises(openai.APIConnectionError):
            await ask(late)
    async with proxy.session(session(["again"])) as third, client_of(third) as client:
        assert (await ask(client)).choices[0].message.content == "again"


async def test_what_cannot_be_done_is_a_bad_request_with_the_mend(serve: Serve) -> None:
    async with serve(["x"]) as (client, chat):
        with pytest.raises(openai.BadRequestError, match="make n calls"):
            await ask(client, n=3)
        with pytest.raises(openai.NotFoundError, match="chat completions"):
            await client.responses.create(model="any", input="hello")
        assert chat.refusal is None


async def test_a_prompt_that_does_not_fit_is_openais_context_length_exceeded(serve: Serve) -> None:
    async with serve(["x"]) as (client, chat):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [{"role": "user", "content": "word " * 600}])
        assert caught.value.code == "context_length_exceeded"
        assert chat.refusal is not None and chat.refusal.stop_reason is StopReason.MAX_CONTEXT


async def test_an_answer_is_cut_at_the_context_left_and_at_the_calls_own_limit(serve: Serve) -> None:
    async with serve(["word " * 300, "word " * 300]) as (client, _):
        answer = await ask(client, max_tokens=5)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
        used = answer.usage.prompt_tokens
        long = [{"role": "user", "content": "hello" + "x" * (LIMITS.max_context - used - 30)}]
        answer = await ask(client, long)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == LIMITS.max_context


async def test_one_call_too_many_is_refused(serve: Serve) -> None:
    async with serve(["a", "b", "c"], max_calls=2) as (client, chat):
        await ask(client)
        await ask(client)
        with pytest.raises(openai.BadRequestError, match="has had its 2 calls"):
            await ask(client)
        assert chat.refusal is not None and chat.refusal.stop_reason is StopReason.MAX_TURNS


async def test_a_single_call_is_handed_on_where_only_one_is_wanted(serve: Serve, tokenizer: TurnTokenizer) -> None:
    one = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with serve([f"{one}\n{one}", "done"]) as (client, chat):
        message = (await ask(client, tools=[TOOL], parallel_tool_calls=False)).choices[0].message
        assert len(message.tool_calls) == 1
        await ask(client, [*HELLO, message, {"role": "tool", "content": "7", "tool_call_id": "x"}], tools=[TOOL])
        assert [len(segment.turns) for segment in chat.store.segments] == [2]


async def test_thoughts_are_told_apart_and_need_not_be_told_again(serve: Serve) -> None:
    thought = "<think>\nhm <tool_call>{ no\n</think>\n\n"
    async with serve([f"{thought}It is 7.", "Sure.", "<think>\nnever " + "word " * 200]) as (client, chat):
        message = (await ask(client)).choices[0].message
        assert (message.content, message.reasoning_content) == ("It is 7.", "hm <tool_call>{ no")
        history = [*HELLO, {"role": "assistant", "content": "It is 7."}, {"role": "user", "content": "Sure?"}]
        await ask(client, history)
        (segment,) = chat.store.segments
        assert [m.content for m in segment.messages] == ["hello", f"{thought}It is 7.", "Sure?", "Sure."]
        cut = (await ask(client)).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length")
        assert cut.message.reasoning_content.startswith("never word")


class Stopping(ScriptedEngine):
    """Obeys stop strings as the real one does: the token that completes one is the last."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        whole = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        for end in range(1, len(whole.token_ids) + 1):
            if any(stop in self.tokenizer.decode(whole.token_ids[:end]) for stop in sampling.stop):
                spans = (type(whole.version_spans[0])(version=0, start=0, end=end),)
                return Completion(
                    token_ids=whole.token_ids[:end],
                    behavior_logprobs=whole.behavior_logprobs[:end],
                    version_spans=spans,
                    finish_reason=FinishReason.STOP,
                )
        return whole


async def test_a_stop_string_is_kept_in_the_record_and_hidden_from_the_agent(
    serve: Serve, tokenizer: TurnTokenizer
) -> None:
    engine = Stopping(tokenizer=tokenizer, script=["Thought: a\nObservation: made up", "fine"])
    async with serve(engine=engine) as (client, chat):
        first = (await ask(client, stop=["Observation:"])).choices[0]
        assert (first.message.content, first.finish_reason) == ("Thought: a\n", "stop")
        # ReAct loops strip what they get, and write the observation themselves.
        echoed = {"role": "assistant", "content": "Thought: a"}
        await ask(client, [*HELLO, echoed, {"role": "user", "content": "Observation: 7"}])
        (segment,) = chat.store.segments
        assert tokenizer.decode(segment.turns[0].completion.token_ids) == "Thought: a\nObservation:"
        assert segment.turns[1].observation_ids[0] == tokenizer.close_id


async def test_the_runs_sampling_rules_and_says_so_once(
    serve: Serve, tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Sampling] = []

    class Watching(ScriptedEngine):
        async def generate(
            self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
        ) -> Completion:
            seen.append(sampling)
            return await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    with caplog.at_level(logging.WARNING, "agentrl.chat.proxy"):
        async with serve(engine=Watching(tokenizer=tokenizer, script=["a", "b"])) as (client, _):
            await ask(client, temperature=0.2)
            await ask(client, temperature=0.3)
    assert [sampling.temperature for sampling in seen] == [1.0, 1.0]
    assert len([r for r in caplog.records if "'temperature'" in r.getMessage()]) == 1


class Hanging(ScriptedEngine):
    """Never answers; knows how often it was told to stop."""

    cancelled = 0
    begun = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self.begun += 1
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_client_that_hangs_up_aborts_its_call(serve: Serve, tokenizer: TurnTokenizer) -> None:
    engine = Hanging(tokenizer=tokenizer, script=[])
    async with serve(engine=engine) as (client, chat):
        asking = asyncio.create_task(ask(client))
        await until(lambda: engine.begun == 1)
        asking.cancel()
        await until(lambda: engine.cancelled == 1)
        assert not chat.has_calls_running
        assert chat.store.segments == []


async def test_the_end_of_a_session_ends_its_calls(
    session: Callable[..., TokenSession], tokenizer: TurnTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Hanging(tokenizer=tokenizer, script=[])
    proxy, other = ChatProxy(), session(["x"])
    async with proxy.session(other):
        async with proxy.session(session(engine=engine)) as endpoint:
            client = client_of(endpoint)
            asking = asyncio.create_task(ask(client))
            await until(lambda: engine.begun == 1)
        assert engine.cancelled == 1
        with pytest.raises(openai.AuthenticationError):
            await asking
        await client.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_engine_that_fails_is_a_500_and_the_end_of_the_session(serve: Serve) -> None:
    async with serve(["only one"]) as (client, chat):
        await ask(client)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await ask(client)
        with pytest.raises(EngineError, match="the script has 1 turns"):
            await chat.failure()


async def test_no_token_is_lost_or_told_twice_whatever_agents_do_at_once(
    session: Callable[..., TokenSession], tokenizer: TurnTokenizer
) -> None:
    rng = random.Random(0)
    returned: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Uneven(ScriptedEngine):
        async def generate(
            self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
        ) -> Completion:
            await asyncio.sleep(rng.choice((0, 0.001, 0.01, 0.03)))
            completion = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
            returned.append((tuple(token_ids), completion.token_ids))
            return completion

    engine = Uneven(tokenizer=tokenizer, script=lambda prompt: f"{rng.choice(('yes', 'no', 'word ' * 30))}")
    chat = session(engine=engine, max_calls=10_000)

    async def agent(client: AsyncOpenAI, n: int) -> None:
        histories: list[list[Any]] = [HELLO]
        for _ in range(12):
            history = [*rng.choice(histories), {"role": rng.choice(("user", "tool")), "content": f"{n}"}]
            if rng.random() < 0.1:
                history[0] = {"role": "system", "content": "another"}
            try:
                async with asyncio.timeout(rng.choice((0.02, 20, 20))):
                    answer = await ask(client, history, max_tokens=rng.choice((3, 50)), n=rng.choice((1, 1, 1, 2)))
            except (TimeoutError, openai.BadRequestError):
                continue
            histories.append([*history, answer.choices[0].message])

    async with ChatProxy().session(chat) as endpoint, client_of(endpoint) as client:
        await asyncio.gather(*(agent(client, n % 3) for n in range(8)))
        await until(lambda: not chat.has_calls_running)
    recorded = []
    for segment in chat.store.segments:
        ids: tuple[int, ...] = ()
        for turn in segment.turns:
            ids += turn.observation_ids
            recorded.append((ids, turn.completion.token_ids))
            ids += turn.completion.token_ids
    assert sorted(recorded) == sorted(returned)
    assert len(recorded) > len(chat.store.segments) > 8


async def test_garbage_is_refused_in_openais_format(session: Callable[..., TokenSession]) -> None:
    async with ChatProxy().session(session(["x"])) as endpoint, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        for content in (b"", b"{", b'{"messages": 1}', b"\xff"):
            reply = await http.post(url, content=content, headers=headers)
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        reply = await http.post(url, content=b"{}")
        assert reply.status_code == 401
