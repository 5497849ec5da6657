"""Weight updates and the requests that wait for them, against the vLLM double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentrl.engine.generation_stream import INITIAL_LABEL
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError, EngineGone, PreviousWeightsKept, WeightsWanted, WeightSyncError
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, Probe, Sampling, TransferInit, WeightsRef
from tests.agentrl.engine.vllm_double import VLLMDouble, vllm_double


def ref(version: int) -> WeightsRef:
    """Weights that the double can prove to hold."""
    return WeightsRef(
        policy_version=version,
        num_bytes=1,
        update_info={"version": version, "path": "/w"},
        checksum=f"weights {version}",
        probe=Probe(token_ids=(1, 2), logprobs=(-1.0 - version,)),
    )


async def updated_twice(engine: VLLMEngine) -> None:
    """The second update begins in the same turn of the event loop in which the first one ends."""
    for version in (1, 2):
        await engine.update_weights(ref(version))


async def asked(double: VLLMDouble, route: str) -> None:
    async with asyncio.timeout(10):
        while not double.asked[route]:
            await asyncio.sleep(0)


async def test_a_request_that_waits_for_one_update_waits_for_the_next_one_too(tokenizer: TurnTokenizer) -> None:
    script = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")
    async with vllm_double(script) as double, VLLMEngine(double.url) as engine:
        updating = asyncio.create_task(updated_twice(engine))
        await asked(double, "pause")
        completion = await engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0", session_id="a")
        await updating
        assert set(completion.policy_versions()) == {2}
        assert double.lies == []


def streamed(version: int, *, moves: bool = True) -> WeightsRef:
    """Weights without a folder. A double that refuses them holds them nevertheless, unless they do not move."""
    probe = Probe(token_ids=(1, 2), logprobs=(-1.0 - version,))
    info = {"version": version} if moves else {}
    return WeightsRef(policy_version=version, num_bytes=1, update_info=info, checksum=f"weights {version}", probe=probe)


@asynccontextmanager
async def holding_version_1(tokenizer: TurnTokenizer, **options: Any) -> AsyncIterator[tuple[VLLMDouble, VLLMEngine]]:
    script = ScriptedEngine(tokenizer=tokenizer, script=lambda prompt: "yes")
    async with (
        vllm_double(script) as double,
        VLLMEngine(double.url, updates=UpdateSettings(update_timeout_s=20), **options) as engine,
    ):
        await engine.update_weights(streamed(1))
        yield double, engine


async def request(engine: VLLMEngine) -> Completion:
    return await engine.generate([1, 2], Sampling(max_tokens=8), request_id="a-0", session_id="a")


async def test_a_server_that_dies_while_it_joins_does_not_end_the_run(tokenizer: TurnTokenizer) -> None:
    """The learner asks again who takes the weights, and that waits for the server's return."""
    init = TransferInit(init_info={"rank_offset": 1, "world_size": 2})
    async with holding_version_1(tokenizer) as (double, engine):
        double.refuses = lambda path: path == "init_weight_transfer_engine"
        with pytest.raises(EngineError, match="out of luck"):
            await engine.init_transfer(init)
        await double.stop()
        with pytest.raises(WeightsWanted):
            await engine.init_transfer(init)
        with pytest.raises(EngineGone):
            await engine.receivers(2)


async def test_a_streamed_update_that_is_refused_before_a_layer_moves_keeps_the_old_weights(
    tokenizer: TurnTokenizer,
) -> None:
    async with holding_version_1(tokenizer) as (double, engine):
        double.refuses = lambda path: path == "update_weights"
        with pytest.raises(PreviousWeightsKept, match=r"out of luck.*continues with version 1"):
            await engine.update_weights(streamed(2, moves=False))
        assert set((await request(engine)).policy_versions()) == {1}
        assert double.lies == [] and not engine.wants_weights


async def test_a_streamed_update_that_broke_off_is_never_resumed_and_a_complete_one_ends_the_wait(
    tokenizer: TurnTokenizer,
) -> None:
    async with holding_version_1(tokenizer) as (double, engine):
        num_resumed = double.asked["resume"]
        double.refuses = lambda path: path == "update_weights"
        with pytest.raises(WeightsWanted, match=r"out of luck.*it has a part of them"):
            await engine.update_weights(streamed(2))
        assert double.asked["resume"] == num_resumed and engine.wants_weights
        waiting = asyncio.create_task(request(engine))
        double.refuses = lambda path: False
        await engine.update_weights(streamed(2))
        assert set((await waiting).policy_versions()) == {2}
        assert double.lies == [] and not engine.wants_weights


async def test_a_server_whose_updates_break_off_twice_is_ended(tokenizer: TurnTokenizer) -> None:
    ended: list[str] = []
    async with holding_version_1(tokenizer, end_server=lambda: ended.append("now")) as (double, engine):
        double.refuses = lambda path: path == "update_weights"
        for _ in range(2):
            assert ended == []
            with pytest.raises(WeightsWanted, match="out of luck"):
                await engine.update_weights(streamed(2))
        assert ended == ["now"]


async def test_a_server_that_is_not_ours_has_to_be_restarted_by_its_owner(tokenizer: TurnTokenizer) -> None:
    async with holding_version_1(tokenizer) as (double, engine):
        double.refuses = lambda path: path == "update_weights"
        with pytest.raises(WeightsWanted):
            await engine.update_weights(streamed(2))
        num_resumed = double.asked["resume"]
        with pytest.raises(WeightSyncError, match=f"restart the engine at {double.url}"):
            await engine.update_weights(streamed(2))
        assert double.asked["resume"] == num_resumed


async def test_a_server_that_does_not_tell_what_it_holds_is_ended(tokenizer: TurnTokenizer) -> None:
    ended: list[str] = []
    async with holding_version_1(tokenizer, end_server=lambda: ended.append("now")) as (double, engine):
        double.refuses = lambda path: path in ("update_weights", "collective_rpc")
        with pytest.raises(WeightsWanted, match="could not be restored"):
            await engine.update_weights(streamed(2))
        assert ended == ["now"]


def changed(version: int, *, gives: int) -> WeightsRef:
    """Changes that should give `version`."""
    update_info = {"version": gives, "path": "/w", "deltas": ["/w/changes"]}
    return replace(ref(version), update_info=update_info)


async def test_changes_that_give_other_weights_are_never_resumed_and_all_weights_end_the_wait(
    tokenizer: TurnTokenizer,
) -> None:
    async with holding_version_1(tokenizer) as (double, engine):
        await engine.update_weights(changed(2, gives=2))
        num_resumed = double.asked["resume"]
        with pytest.raises(WeightsWanted, match="what changed since /w does not give version 3"):
            await engine.update_weights(changed(3, gives=2))
        assert double.asked["resume"] == num_resumed and engine.wants_weights
        waiting = asyncio.create_task(request(engine))
        await engine.update_weights(ref(3))
        assert set((await waiting).policy_versions()) == {3}
        assert double.lies == [] and not engine.wants_weights


async def test_a_restarted_server_that_cannot_use_the_changes_waits_for_all_weights(tokenizer: TurnTokenizer) -> None:
    starts = [1]
    async with holding_version_1(tokenizer, num_starts=lambda: len(starts)) as (double, engine):
        update = changed(2, gives=2)
        await engine.update_weights(update)
        double.restart()
        double.label = INITIAL_LABEL  # type: ignore[assignment]
        starts.append(2)
        update.update_info["version"] = 1  # it reads something else now
        waiting = asyncio.create_task(request(engine))
        async with asyncio.timeout(10):
            while not engine.wants_weights:
                await asyncio.sleep(0)
        await engine.update_weights(ref(2))
        assert set((await waiting).policy_versions()) == {2}
        assert double.lies == [] and not engine.wants_weights
