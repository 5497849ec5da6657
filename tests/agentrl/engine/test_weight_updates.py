"""Weight updates and the requests that wait for them, against the vLLM double."""

from __future__ import annotations

import asyncio

from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.testing import ScriptedEngine
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Probe, Sampling, WeightsRef
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
