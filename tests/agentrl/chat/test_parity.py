"""An agent talks to the real vLLM through the proxy: the record is what was sampled, as transformers confirms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from agentrl.chat.proxy import ChatProxy
from agentrl.chat.token_session import TokenSession
from agentrl.config import RolloutConfig
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.rollouts.generation import TokenGenerator
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Probe, Sampling, Turn, WeightsRef
from tests.conftest import VLLMServer
from tests.device import parity_bound

pytestmark = pytest.mark.engine

BOUND = parity_bound()
LIMITS = RolloutConfig(max_context=1000, max_turn_tokens=48)
TOOL: Any = {
    "type": "function",
    "function": {"name": "python", "description": "Run it.", "parameters": {"type": "object", "properties": {}}},
}
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}]


class Judge:
    """The model in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """[T] -> [T-1]"""
        import torch

        tokens = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logprobs = self._model(tokens).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    def worst(self, turns: Sequence[Turn]) -> float:
        """Largest |recorded - transformers| over the actions of one segment."""
        ids: list[int] = []
        recorded: dict[int, float] = {}
        for turn in turns:
            ids += turn.observation_ids
            recorded |= dict(enumerate(turn.completion.behavior_logprobs, start=len(ids)))
            ids += turn.completion.token_ids
        scored = self.logprobs(ids)
        return max(abs(logprob - scored[t - 1]) for t, logprob in recorded.items())


@pytest.fixture(scope="module")
def judge(tiny_model_dir: Path) -> Judge:
    return Judge(tiny_model_dir)


@dataclass(kw_only=True)
class Recording:
    """An engine that remembers what it was asked."""

    inner: VLLMEngine
    asked: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    num_begun: int = 0
    num_cancelled: int = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self.num_begun += 1
        try:
            completion = await self.inner.generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.asked.append((tuple(token_ids), completion))
        return completion

    async def update_weights(self, ref: WeightsRef) -> float:
        return await self.inner.update_weights(ref)

    async def init_transfer(self, init: Any) -> None:
        await self.inner.init_transfer(init)


@pytest.fixture
async def engine(vllm_server: VLLMServer, judge: Judge) -> AsyncIterator[Recording]:
    """The server with the model's own weights, whatever another test left there."""
    probe_ids = tuple(range(5, 40))
    async with VLLMEngine(vllm_server.url, model=vllm_server.model) as inner:
        ref = WeightsRef(
            policy_version=await inner.version() + 1,
            num_bytes=(judge.folder / "model.safetensors").stat().st_size,
            update_info={"path": str(judge.folder)},
            checksum="",
            probe=Probe(token_ids=probe_ids, logprobs=tuple(judge.logprobs(probe_ids))),
        )
        await inner.update_weights(ref)
        yield Recording(inner=inner)


@asynccontextmanager
async def agent(
    engine: Recording, model: Path, *, limits: RolloutConfig = LIMITS
) -> AsyncIterator[tuple[AsyncOpenAI, TokenSession]]:
    tokenizer = TurnTokenizer.load(str(model))
    tokenizer = tokenizer.with_tool_format("hermes")
    session = TokenSession(
        TokenGenerator(engine, tokenizer, session_id=f"parity-{id(engine)}", seed=None),
        tokenizer=tokenizer,
        config=limits,
        sampling=Sampling(max_tokens=limits.max_turn_tokens, stop_token_ids=tokenizer.stop_token_ids),
        max_calls=100,
    )
    async with (
        ChatProxy().session(session) as endpoint,
        AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=60) as client,
    ):
        yield client, session


async def ask(client: AsyncOpenAI, history: Sequence[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=list(history), **options)


def check(session: TokenSession, engine: Recording, judge: Judge) -> None:
    """Every prompt is its segment's tokens before it; every sampled token is an action once; logprobs are right."""
    recorded = []
    for segment in session.store.segments:
        assert judge.worst(segment.turns) < BOUND
        ids: list[int] = []
        for turn in segment.turns:
            ids += turn.observation_ids
            recorded.append((tuple(ids), turn.completion))
            ids += turn.completion.token_ids
    key = [(prompt, completion.token_ids) for prompt, completion in recorded]
    assert sorted(key) == sorted((prompt, completion.token_ids) for prompt, completion in engine.asked)


async def test_four_turns_with_a_tool_are_token_exact(engine: Recording, judge: Judge) -> None:
    async with agent(engine, judge.folder) as (client, session):
        history = [*HELLO]
        for n in range(4):
            message = (await ask(client, history, tools=[TOOL])).choices[0].message
            history += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "content": f"<|im_end|> {n}", "tool_call_id": "x"},
            ]
    (segment,) = session.store.segments
    assert len(segment.turns) == 4
    prompts = [prompt for prompt, _ in engine.asked]
    for (prompt, completion), later in zip(engine.asked, prompts[1:], strict=False):
        assert later[: len(prompt) + len(completion.token_ids)] == prompt + completion.token_ids
    check(session, engine, judge)


async def test_forks_and_branches_are_segments_of_their_own(engine: Recording, judge: Judge) -> None:
    async with agent(engine, judge.folder) as (client, session):
        first = (await ask(client, HELLO)).choices[0].message
        grown = [*HELLO, first, {"role": "user", "content": "Are you sure?"}]
        for _ in range(3):  # the trunk, and two branches
            await ask(client, grown)
        await ask(client, [{"role": "system", "content": "Be long."}, *grown[1:]])  # a fork
    assert [len(segment.turns) for segment in session.store.segments] == [2, 1, 1, 1]
    trunk, branch = session.store.segments[:2]
    assert branch.turns[0].observation_ids == (
        *trunk.turns[0].observation_ids,
        *trunk.turns[0].completion.token_ids,
        *trunk.turns[1].observation_ids,
    )
    check(session, engine, judge)


async def test_calls_at_once_do_not_mix(engine: Recording, judge: Judge) -> None:
    async with agent(engine, judge.folder) as (client, session):

        async def talk(n: int) -> None:
            history: list[Any] = [{"role": "user", "content": f"Talk {n % 3}."}]
            for _ in range(3):
                stream = await ask(client, history, stream=True)
                text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
                history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]

        await asyncio.gather(*(talk(n) for n in range(9)))
    assert sum(len(segment.turns) for segment in session.store.segments) == 27
    check(session, engine, judge)


async def test_a_stop_string_and_a_limit_of_the_call_hold(engine: Recording, judge: Judge) -> None:
    async with agent(engine, judge.folder) as (client, session):
        cut = (await ask(client, HELLO, max_tokens=6)).choices[0]
        assert cut.finish_reason in ("length", "stop")
        for _ in range(4):
            answer = (await ask(client, HELLO, stop=["e", "a", "1"])).choices[0]
            assert not {"e", "a", "1"} & set(answer.message.content)
        with pytest.raises(BadRequestError, match="maximum context length is 1000"):
            await ask(client, [{"role": "user", "content": "word " * 500}])
    check(session, engine, judge)


async def test_hanging_up_aborts_the_request_and_leaves_no_trace(engine: Recording, judge: Judge) -> None:
    async with agent(engine, judge.folder, limits=LIMITS.model_copy(update={"max_turn_tokens": 900})) as (
        client,
        session,
    ):
        asking = [asyncio.create_task(ask(client, HELLO)) for _ in range(8)]
        async with asyncio.timeout(20):
            while engine.num_begun < 8:
                await asyncio.sleep(0.005)
        for task in asking:
            task.cancel()
        async with asyncio.timeout(20):
            while session.has_calls_running:
                await asyncio.sleep(0.01)
        assert engine.num_cancelled > 0
        await ask(client, HELLO, max_tokens=9)
    check(session, engine, judge)
