"""Agents with loops of their own, and code in the sandbox, in a worker's process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.workers.launch import rollout_workers, workers_ready
from agentrl.workers.records import RunInfo
from sandbox.embedded import local_service
from tests.agentrl.engine.vllm_double import vllm_double
from tests.agentrl.workers import worlds
from tests.agentrl.workers.test_worker_processes import SECRETS, config_of


@pytest.mark.slow
async def test_an_agent_with_its_own_loop_and_code_in_the_sandbox_are_played_by_a_worker(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: TurnTokenizer
) -> None:
    config = config_of(tmp_path, tokenizer_dir, world="Calculating", workers=1)
    graph, task = WaitGraph(), worlds.Calculating.tasks("train")[3]
    script = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")
    async with (
        asyncio.timeout(90),
        local_service("auto", 2, {}) as (sandbox_url, token),
        vllm_double(script) as double,
        VLLMEngine(double.url) as engine,
    ):
        info = RunInfo(config=config.model_dump(mode="json"), model_path=config.model.path, sandbox_url=sandbox_url)
        secrets = replace(SECRETS, sandbox=token)
        async with rollout_workers(config, engine, info, secrets=secrets, logs=tmp_path, wait_graph=graph) as found:
            dispatcher, parts = found
            await workers_ready(dispatcher, parts, graph)
            group = await dispatcher.play_group(engine, 0, task, kind="train")
    assert [one.reward for one in group.trajectories] == [1.0] * config.rollout.group_size
    assert all(tokenizer.decode(one.turns[0].completion.token_ids).startswith("yes") for one in group.trajectories)
