"""Engines whose weights another client updates: an answer counts only once its weights are proven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from agentrl.engine.base import EngineState
from agentrl.engine.followed import EngineStates, FollowedEngines
from agentrl.errors import EngineError
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Sampling
from tests.agentrl.engine.vllm_double import VLLMDouble, vllm_double

SAMPLING = Sampling(max_tokens=4)


@dataclass
class Side:
    """The engines as the orchestrator would describe them, and a client that follows the description."""

    doubles: list[VLLMDouble]
    states: EngineStates
    engine: FollowedEngines
    described: list[EngineState]
    failures: list[tuple[int, int, str]] = field(default_factory=list)

    def say(self, index: int, **changes: object) -> None:
        self.described[index] = replace(self.described[index], **changes)  # type: ignore[arg-type]
        self.states.apply(self.described)

    def ask(self, name: str = "train-0-0-0-0") -> asyncio.Task[Completion]:
        session = name.rpartition("-")[0]
        engine = self.engine.named("w0")
        return asyncio.create_task(engine.generate([5, 6], SAMPLING, request_id=name, session_id=session))


@asynccontextmanager
async def following(tokenizer: TurnTokenizer, *, number: int = 1, is_spare: bool = False) -> AsyncIterator[Side]:
    async with AsyncExitStack() as stack:
        scripted = [ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes") for _ in range(number)]
        doubles = [await stack.enter_async_context(vllm_double(one)) for one in scripted]
        described = [
            EngineState(url=double.url, model="policy", version=0, is_open=True, is_serving=True) for double in doubles
        ]
        states = EngineStates()
        states.apply(described)
        side: Side

        async def report(index: int, num_checks: int, error: EngineError) -> None:
            side.failures.append((index, num_checks, str(error)))

        engine = await stack.enter_async_context(
            FollowedEngines(states, report, request_timeout_s=5, return_timeout_s=0.5, is_spare=is_spare)
        )
        side = Side(doubles, states, engine, described)
        yield side


async def test_an_answer_of_a_version_counts_once_the_engine_is_proven_to_hold_it(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        side.doubles[0].held = side.doubles[0].label = 1
        side.doubles[0].engine.policy_version = 1
        asked = side.ask()
        await asyncio.sleep(0.2)
        assert not asked.done(), "nobody has proven version 1 yet"
        side.say(0, is_open=False)
        await asyncio.sleep(0.05)
        assert not asked.done()
        side.say(0, is_open=True, version=1)
        assert [span.version for span in (await asked).version_spans] == [1]
        assert side.engine.num_tokens == len((await asked).token_ids)


async def test_an_answer_under_an_update_that_was_refused_is_asked_for_again(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        double = side.doubles[0]
        double.held = double.label = 1  # resumed with weights whose proof fails, and with those before them after that
        asked = side.ask()
        await asyncio.sleep(0.2)
        double.held = double.label = 0
        side.say(0, num_refused=1)
        assert [span.version for span in (await asked).version_spans] == [0]
        assert double.asked["inference/v1/generate"] == 2


async def test_a_request_waits_while_weights_change_and_carries_the_client_s_name(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        side.say(0, is_open=False)
        asked = side.ask()
        await asyncio.sleep(0.1)
        assert not side.doubles[0].asked["inference/v1/generate"]
        side.say(0, is_open=True)
        await asked
        assert list(side.doubles[0].engine.prompts) == ["train-0-0-0-0@w0"]


async def test_a_failure_is_reported_and_the_request_made_again_after_the_look(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        side.doubles[0].spoil = lambda chunks: chunks[1]["choices"][0]["weight_versions"][0].update(version="default")
        asked = side.ask()
        while not side.failures:
            await asyncio.sleep(0.01)
        ((index, num_checks, why),) = side.failures
        assert (index, num_checks) == (0, 0) and "was restarted" in why
        side.doubles[0].spoil = lambda chunks: None
        side.say(0, num_checks=1)
        await asked


async def test_a_session_moves_when_its_engine_is_taken_out_and_stays_where_it_went(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer, number=2) as side:
        await side.ask()
        assert [double.asked["inference/v1/generate"] for double in side.doubles] == [1, 0]
        await side.doubles[0].stop()
        asked = side.ask("train-0-0-0-1")
        while not side.failures:
            await asyncio.sleep(0.01)
        side.say(0, is_serving=False, num_checks=1)
        await asked
        side.say(0, is_serving=True)
        await side.ask("train-0-0-0-2")
        assert side.doubles[1].asked["inference/v1/generate"] == 2


async def test_a_refused_request_is_no_reason_to_look_at_the_engine(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        side.doubles[0].token = "another"
        with pytest.raises(EngineError, match="AGENTRL_ENGINE_TOKEN"):
            await side.ask()
        assert side.failures == []


async def test_an_engine_that_only_the_orchestrator_reaches_is_named(
    tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engine.followed.RETRY_S", 0.01)
    async with following(tokenizer) as side:
        await side.doubles[0].stop()
        asked = side.ask()
        while not asked.done():
            if side.failures:
                side.failures.clear()
                side.say(0, num_checks=side.described[0].num_checks + 1)
            await asyncio.sleep(0.005)
        with pytest.raises(EngineError, match="the orchestrator reaches it, this worker does not"):
            await asked


async def test_without_any_engine_a_request_ends_past_the_deadline(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer) as side:
        side.say(0, is_serving=False)
        with pytest.raises(EngineError, match=r"none of 1 engines came back within 0\.5 s"):
            await side.ask()


@pytest.mark.parametrize("is_spare", [False, True])
async def test_engines_that_evaluate_and_engines_that_train_never_take_each_other_s_requests(
    tokenizer: TurnTokenizer, is_spare: bool
) -> None:
    async with following(tokenizer, number=2, is_spare=is_spare) as side:
        side.say(1, is_spare=True)
        await side.ask()
        await side.ask("train-1-0-0-0")
        assert [double.asked["inference/v1/generate"] for double in side.doubles] == ([0, 2] if is_spare else [2, 0])
        side.say(int(is_spare), is_serving=False)
        with pytest.raises(EngineError, match="none of 1 engines came back"):
            await side.ask()


async def test_an_engine_that_returns_elsewhere_is_found_there(tokenizer: TurnTokenizer) -> None:
    async with following(tokenizer, number=2) as side:
        side.described.pop()
        side.say(0)
        await side.ask()
        side.say(0, url=side.doubles[1].url)
        await side.ask("train-1-0-0-0")
        assert [double.asked["inference/v1/generate"] for double in side.doubles] == [1, 1]
