"""An engine that releases its memory while the learner steps: the order of calls, failures, and the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError, WeightsWanted, WeightSyncError
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Sampling, WeightsRef
from tests.agentrl.engine.judge import PROMPT, Judge, worst
from tests.agentrl.engine.test_engine_failures import start_many, until_streaming
from tests.agentrl.engine.test_pool import SAMPLING, Breakable, pool_of, until
from tests.agentrl.engine.test_pool import ref as any_ref
from tests.agentrl.engine.test_weight_updates import ref
from tests.agentrl.engine.vllm_double import VLLMDouble, vllm_double
from tests.agentrl.training.troubles import Trouble
from tests.conftest import VLLMServer, serving_tiny_model
from tests.device import parity_bound

CANNOT = Trouble("engine at ... cannot release its memory: start it on a GPU with --enable-sleep-mode")
TAKE = ["start_weight_update", "update_weights", "finish_weight_update"]
PROVE = ["collective_rpc", "inference/v1/generate"]
WOKEN = ["wake_up weights", *TAKE, "wake_up kv_cache", "resume", *PROVE]


@pytest.fixture
async def double(tokenizer: TurnTokenizer) -> AsyncIterator[VLLMDouble]:
    async with vllm_double(ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")) as double:
        yield double


async def test_weights_are_there_before_the_cache_is_woken_and_generation_goes_on(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        await engine.update_weights(ref(1))
        double.calls.clear()
        await engine.sleep()
        assert double.calls == ["sleep"]
        await engine.update_weights(ref(2))
        assert double.calls == ["sleep", *WOKEN]
        double.calls.clear()
        await engine.update_weights(ref(3))
        assert double.calls == ["pause", *TAKE, "resume", *PROVE]  # it was awake


async def test_a_paused_engine_takes_no_token_and_goes_on_with_the_new_weights(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        await engine.update_weights(ref(1))
        double.calls.clear()
        await engine.pause()
        request = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0"))
        await asyncio.sleep(0.05)
        assert not request.done() and double.calls == ["pause"]
        await engine.update_weights(ref(2))
        assert double.calls[:6] == ["pause", "pause", *TAKE, "resume"]
        assert set((await request).policy_versions()) == {2}
        double.refuses = lambda path: path == "pause"
        with pytest.raises(EngineError, match=r"POST /pause.* failed with status 500"):
            await engine.pause()
        double.refuses = lambda path: False
        await engine.update_weights(ref(3))
        await engine.generate([1, 2], Sampling(max_tokens=8), request_id="b-0")
    assert double.lies == []


async def test_an_engine_that_cannot_pause_leaves_its_pool() -> None:
    broken = Breakable("b", breaks=lambda what: EngineError("no") if what == "pause" else None)
    whole = Breakable("a")
    async with pool_of(whole, broken) as pool:
        await pool.pause()
        assert whole.updates == [("pause", 0)] and pool.metrics()["engine/num_serving"] == 1


async def test_a_request_that_meets_a_sleeping_engine_gets_the_new_weights(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        await engine.sleep()
        request = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0"))
        await asyncio.sleep(0.05)
        assert not request.done() and not double.asked["inference/v1/generate"]
        await engine.update_weights(ref(1))
        assert set((await request).policy_versions()) == {1}
    assert double.lies == []


async def test_an_engine_that_was_restarted_asleep_is_paused_for_its_update(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        await engine.sleep()
        double.restart()
        double.calls.clear()
        await engine.update_weights(ref(1))
        assert double.calls == ["wake_up weights", "pause", *TAKE, "resume", *PROVE]


async def test_weights_that_cannot_be_loaded_after_a_sleep_leave_the_previous_ones(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        await engine.update_weights(ref(1))
        await engine.sleep()
        double.refuses = lambda path: path == "update_weights" and double.held == 2
        with pytest.raises(WeightSyncError, match="It continues with version 1"):
            await engine.update_weights(ref(2))
        assert double.held == 1 and double.asleep == set()
        completion = await engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0")
        assert set(completion.policy_versions()) == {1}


@pytest.mark.parametrize(("path", "num_tries"), [({"path": "/w"}, 1), ({}, 2)])
async def test_an_engine_that_does_not_wake_is_started_again_and_proven(
    double: VLLMDouble, path: dict[str, str], num_tries: int
) -> None:
    def end() -> None:
        double.restart()
        double.refuses = lambda path: False

    def new(version: int) -> WeightsRef:
        return replace(ref(version), update_info={"version": version, **path})

    async with VLLMEngine(double.url, end_server=end) as engine:
        await engine.update_weights(new(1))
        await engine.sleep()
        double.refuses = lambda path: path == "wake_up"
        for _ in range(num_tries):
            with pytest.raises(WeightsWanted, match="POST /wake_up failed with status 500"):
                await engine.update_weights(new(2))
            assert engine.wants_weights
        assert engine.metrics()["engine/restarts"] == 1 and double.held == 0
        await engine.update_weights(new(2))  # the learner publishes again
        assert double.held == 2 and double.asleep == set() and not engine.wants_weights
        completion = await engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0")
        assert set(completion.policy_versions()) == {2}


async def test_an_engine_that_does_not_fall_asleep_is_named(double: VLLMDouble) -> None:
    async with VLLMEngine(double.url) as engine:
        double.refuses = lambda path: path == "sleep"
        with pytest.raises(EngineError, match=r"POST /sleep failed with status 500: out of luck"):
            await engine.sleep()


async def test_a_server_started_without_sleep_mode_is_refused(double: VLLMDouble) -> None:
    double.enables_sleep = False
    async with VLLMEngine(double.url):
        pass
    with pytest.raises(EngineError, match=r"or set engine\.sleep_while_training=false") as found:
        async with VLLMEngine(double.url, updates=UpdateSettings(sleeps=True)):
            pass
    assert CANNOT.is_in(found.value)


async def test_a_pool_sleeps_and_wakes_together(tokenizer: TurnTokenizer) -> None:
    script = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")
    async with vllm_double(script) as first, vllm_double(script) as second:
        engines = [VLLMEngine(double.url) for double in (first, second)]
        async with EnginePool(engines) as pool:
            await pool.sleep()
            assert first.calls[-1] == second.calls[-1] == "sleep"
            await pool.update_weights(ref(1))
            for double in (first, second):
                assert double.calls[-len(WOKEN) :] == WOKEN and double.held == 1


async def test_an_engine_that_cannot_sleep_leaves_the_pool_and_returns_with_the_next_weights() -> None:
    state: dict[str, EngineError | None] = {"sleep": EngineError("no")}
    stubborn, good = Breakable("a", breaks=state.get), Breakable("b")
    async with pool_of(stubborn, good) as pool:
        await pool.sleep()
        assert good.updates == [("sleep", 0)] and pool.metrics()["engine/num_serving"] == 1
        await asyncio.sleep(0.1)
        assert stubborn.updates == []  # it would take memory that the learner needs
        await pool.update_weights(any_ref(1))
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert stubborn.version == good.version == 1
        state["sleep"] = None
        await pool.sleep()


async def test_a_pool_of_which_none_can_sleep_says_so() -> None:
    engines = [Breakable(url, breaks=lambda what: EngineError("no") if what == "sleep" else None) for url in "ab"]
    async with pool_of(*engines) as pool:
        with pytest.raises(EngineError, match="no"):
            await pool.sleep()
        await pool.update_weights(any_ref(1))
        assert (await pool.generate([1], SAMPLING, request_id="0-0")).version_spans[0].version == 1


@pytest.mark.engine
@pytest.mark.parametrize("stop", [VLLMEngine.sleep, VLLMEngine.pause])
async def test_the_real_server_keeps_running_requests_over_a_sleep_and_a_pause(
    vllm_server: VLLMServer, judge: Judge, tiny_model_dir: Path, stop: Callable[[VLLMEngine], Awaitable[None]]
) -> None:
    """vLLM's CPU build releases nothing, but its scheduler, its tags and its routes are those of a GPU."""
    updates = UpdateSettings(parity_bound=parity_bound())
    async with VLLMEngine(vllm_server.url, updates=updates) as engine:
        first = await engine.version() + 1
        await engine.update_weights(judge.ref(first, 0))
        running = start_many(engine, 16, 900)  # enough that some still run where this process is slow to look
        await until_streaming(engine, 20)
        await stop(engine)
        assert await engine.control.is_paused() and not all(request.done() for request in running)
        await engine.update_weights(judge.ref(first + 1, 1))
        assert not await engine.control.is_paused()
        completions = enumerate(await asyncio.gather(*running), start=5)
        over = [(last, one) for last, one in completions if set(one.policy_versions()) == {first, first + 1}]
        assert over
        assert worst(over[0][1], [*PROMPT, over[0][0]], judge, first) < parity_bound()
        await engine.update_weights(judge.ref(first + 2, 0))


@pytest.mark.engine
async def test_a_real_server_without_sleep_mode_is_refused(vllm_server: VLLMServer) -> None:
    with pytest.raises(EngineError, match="cannot release its memory"):
        async with VLLMEngine(vllm_server.url, updates=UpdateSettings(sleeps=True)):
            pass


@pytest.mark.gpu
@pytest.mark.engine
async def test_the_memory_of_a_gpu_is_free_while_the_engine_sleeps(
    judge: Judge, tiny_model_dir: Path, tmp_path: Path
) -> None:
    import torch

    settings = {"sleep_while_training": True, "kv_cache_bytes": 4 * 2**30}
    updates = UpdateSettings(sleeps=True, parity_bound=parity_bound())
    with serving_tiny_model(tiny_model_dir, tmp_path, engine=settings) as server:
        async with VLLMEngine(server.url, updates=updates) as engine:
            await engine.update_weights(judge.ref(1, 0))
            awake_bytes, _ = torch.cuda.mem_get_info()
            await engine.sleep()
            asleep_bytes, _ = torch.cuda.mem_get_info()
            assert asleep_bytes - awake_bytes > 3 * 2**30
            await engine.update_weights(judge.ref(2, 1))
            assert torch.cuda.mem_get_info()[0] < asleep_bytes - 3 * 2**30
            completion = await engine.generate(PROMPT, Sampling(max_tokens=64), request_id="awake-0")
            assert worst(completion, PROMPT, judge, 1) < parity_bound()
