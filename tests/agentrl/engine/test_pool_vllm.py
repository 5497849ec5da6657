"""Two real vLLM servers as one engine: one is killed, nothing is lost, and it returns with the present weights."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.engine import launch_servers
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.training import launch
from agentrl.types import Completion, Sampling
from tests.agentrl.engine.judge import PROMPT, Judge, worst
from tests.agentrl.engine.test_engine_failures import BOUND, config_for, server_of, unique, until_streaming

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(400)]


async def play(pool: EnginePool, count: int, max_tokens: int) -> list[Completion]:
    sampling = Sampling(max_tokens=max_tokens)
    requests = (pool.generate([*PROMPT, 5 + i], sampling, request_id=f"{unique()}-0") for i in range(count))
    return list(await asyncio.gather(*requests))


def assert_true(completions: list[Completion], judge: Judge, *, version: int) -> None:
    for i, completion in enumerate(completions):
        assert set(completion.policy_versions()) == {version}
        assert worst(completion, [*PROMPT, 5 + i], judge, 0) < BOUND


async def test_one_of_two_engines_is_killed_and_nothing_is_lost(
    tiny_model_dir: Path, judge: Judge, tmp_path: Path
) -> None:
    config = config_for(tiny_model_dir, replicas=2, update_order="rolling", max_restarts=1)
    async with (
        launch_servers.engine_servers(config, model_path=config.model.path, logs=tmp_path) as servers,
        launch.watching(*(parts := launch_servers.parts_of(servers))),
    ):
        await launch_servers.engines_ready(servers, config.engine)
        async with launch_servers.engine_client(servers, config) as pool:
            assert isinstance(pool, EnginePool)
            update = await pool.update_weights(judge.ref(1, 1))
            assert update.parity is not None and update.parity.max_abs < BOUND
            running = asyncio.create_task(play(pool, 12, 400))
            first = pool._engines[0].client
            assert isinstance(first, VLLMEngine)
            await until_streaming(first, 50)
            os.killpg(server_of(parts[0]), signal.SIGKILL)
            assert_true(await running, judge, version=1)
            assert pool.metrics()["engine/ejections"] == 1
            assert 1 <= pool.metrics()["engine/moved_requests"] <= 6  # one may have ended by itself before
            await pool.update_weights(judge.ref(2, 0))
            async with asyncio.timeout(120):
                while pool.metrics()["engine/num_serving"] < 2:
                    await asyncio.sleep(0.2)
            assert_true(await play(pool, 8, 40), judge, version=2)
    assert sorted(path.name for path in tmp_path.glob("engine-*.log")) == ["engine-0.log", "engine-1.log"]
