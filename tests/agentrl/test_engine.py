"""The engine client against the real vLLM server, with transformers as the judge."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.engine import KvOnUpdate, OpenAIEngine, VLLMEngine
from agentrl.errors import EngineError, WeightSyncError
from agentrl.types import Completion, FinishReason, Probe, Sampling, WeightsRef
from tests.conftest import VLLMServer

pytestmark = pytest.mark.engine

BOUND = 1e-4
PROMPT = [(7 * i) % 300 + 5 for i in range(40)]


class Judge:
    """Two models in Hugging Face layout and their own log-probabilities."""

    def __init__(self, folders: Sequence[Path]) -> None:
        from transformers import AutoModelForCausalLM

        self.folders = folders
        self._models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]

    def logprobs(self, token_ids: Sequence[int], which: int) -> list[float]:
        """[T] -> [T-1]"""
        import torch

        tokens = torch.tensor([token_ids])
        with torch.no_grad():
            logprobs = self._models[which](tokens).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    def ref(self, version: int, which: int) -> WeightsRef:
        """The weights of `which`, as version `version`."""
        probe = Probe(token_ids=tuple(PROMPT), logprobs=tuple(self.logprobs(PROMPT, which)))
        return WeightsRef(policy_version=version, path=str(self.folders[which]), num_bytes=0, probe=probe)


@pytest.fixture(scope="module")
def judge(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(other := tmp_path_factory.mktemp("other"))
    return Judge([tiny_model_dir, other])


async def connect(server: VLLMServer, judge: Judge, kv_on_update: KvOnUpdate) -> AsyncIterator[VLLMEngine]:
    """A client whose engine holds model 0, whatever an earlier test left."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        (await http.post("/resume")).raise_for_status()
    async with VLLMEngine(server.url, model=server.model, kv_on_update=kv_on_update, parity_bound=BOUND) as engine:
        await engine.update_weights(judge.ref(await engine.version() + 1, 0))
        yield engine


@pytest.fixture
async def engine(vllm_server: VLLMServer, judge: Judge) -> AsyncIterator[VLLMEngine]:
    async for engine in connect(vllm_server, judge, "recompute"):
        yield engine


@pytest.fixture
async def stale_engine(vllm_server: VLLMServer, judge: Judge) -> AsyncIterator[VLLMEngine]:
    async for engine in connect(vllm_server, judge, "stale"):
        yield engine


def unique() -> str:
    return uuid.uuid4().hex


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def worst(completion: Completion, prompt: Sequence[int], judge: Judge, first_version: int) -> float:
    """Largest |engine - transformers|, each token judged by the model that its span names."""
    tokens = [*prompt, *completion.token_ids]
    by_model = [judge.logprobs(tokens, which)[len(prompt) - 1 :] for which in (0, 1)]
    versions = list(completion.policy_versions())
    expected = [by_model[(version - first_version) % 2][t] for t, version in enumerate(versions)]
    return difference(completion.behavior_logprobs, expected)


async def test_logprobs_are_those_of_transformers(engine: VLLMEngine, judge: Judge) -> None:
    version = await engine.version()
    completion = await engine.generate(PROMPT, Sampling(max_tokens=64), request_id=unique())
    assert worst(completion, PROMPT, judge, version) < BOUND


async def test_logprobs_are_of_the_distribution_sampled_from(engine: VLLMEngine, judge: Judge) -> None:
    import torch

    completion = await engine.generate(PROMPT, Sampling(max_tokens=32, temperature=0.5), request_id=unique())
    tokens = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        scaled = (judge._models[0](tokens).logits[0, len(PROMPT) - 1 : -1] / 0.5).log_softmax(-1)
    expected = scaled.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].tolist()
    assert difference(completion.behavior_logprobs, expected) < BOUND


async def test_score_is_the_models_own(engine: VLLMEngine, judge: Judge) -> None:
    assert difference(await engine.score(PROMPT), judge.logprobs(PROMPT, 0)) < BOUND


async def test_a_stop_token_ends_the_turn_and_is_kept(engine: VLLMEngine) -> None:
    # Every token stops: the first one sampled is the last.
    sampling = Sampling(max_tokens=50, stop_token_ids=tuple(range(300)))
    completion = await engine.generate(PROMPT, sampling, request_id=unique())
    assert completion.finish_reason is FinishReason.STOP
    assert all(token >= 300 for token in completion.token_ids[:-1])


async def many(engine: VLLMEngine, count: int, max_tokens: int) -> list[asyncio.Task[Completion]]:
    sampling = Sampling(max_tokens=max_tokens)
    return [
        asyncio.create_task(engine.generate([*PROMPT, i], sampling, request_id=unique())) for i in range(5, 5 + count)
    ]


async def test_running_requests_go_on_and_every_token_names_its_weights(engine: VLLMEngine, judge: Judge) -> None:
    version = await engine.version()
    running = await many(engine, 8, 700)
    for step in (1, 2):
        await asyncio.sleep(0.5)
        gap_s = await engine.update_weights(judge.ref(version + step, step % 2))
        assert 0 < gap_s < 30
    completions = await asyncio.gather(*running)
    assert max(len(completion.version_spans) for completion in completions) == 3
    for i, completion in enumerate(completions):
        assert worst(completion, [*PROMPT, 5 + i], judge, version) < BOUND


async def test_stale_kv_never_serves_a_request_of_the_next_version(stale_engine: VLLMEngine, judge: Judge) -> None:
    prompt = [(11 * i) % 300 + 5 for i in range(600)]  # several blocks of the prefix cache
    version = await stale_engine.version()
    await stale_engine.generate(prompt, Sampling(max_tokens=2), request_id=unique())
    await stale_engine.update_weights(judge.ref(version + 1, 1))
    completion = await stale_engine.generate(prompt, Sampling(max_tokens=8), request_id=unique())
    assert worst(completion, prompt, judge, version) < BOUND


async def test_stale_keeps_running_requests_on_their_old_kv(stale_engine: VLLMEngine, judge: Judge) -> None:
    version = await stale_engine.version()
    running = await many(stale_engine, 8, 700)
    await asyncio.sleep(0.5)
    await stale_engine.update_weights(judge.ref(version + 1, 1))
    completions = await asyncio.gather(*running)
    across = [(i, c) for i, c in enumerate(completions) if len(c.version_spans) == 2]
    assert across
    # Fresh KV is not what they were sampled with: the very difference that `recompute` removes.
    assert max(worst(completion, [*PROMPT, 5 + i], judge, version) for i, completion in across) > BOUND


async def test_other_weights_on_disk_than_the_learners_are_a_sync_error(engine: VLLMEngine, judge: Judge) -> None:
    version = await engine.version() + 1
    right, wrong = judge.ref(version, 0), judge.ref(version, 1)
    with pytest.raises(WeightSyncError, match="does not hold the learner's weights"):
        await engine.update_weights(WeightsRef(policy_version=version, path=wrong.path, num_bytes=0, probe=right.probe))


async def test_weights_that_cannot_be_loaded_leave_the_engine_paused(
    vllm_server: VLLMServer, engine: VLLMEngine, judge: Judge, tmp_path: Path
) -> None:
    version = await engine.version() + 1
    ref = judge.ref(version, 0)
    with pytest.raises(WeightSyncError, match=r"no model.*safetensors"):
        await engine.update_weights(
            WeightsRef(policy_version=version, path=str(tmp_path), num_bytes=0, probe=ref.probe)
        )
    with pytest.raises(EngineError, match="is paused"):
        async with VLLMEngine(vllm_server.url):
            pass


async def in_flight(server: VLLMServer) -> int:
    """How many requests the server tracks. Ends them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        reply: dict[str, Any] = (await http.post("/abort_requests", json={})).json()
    return int(reply["aborted"])


async def test_cancelling_a_call_aborts_its_request(vllm_server: VLLMServer, engine: VLLMEngine) -> None:
    await engine.pause(clear_cache=False)
    running = await many(engine, 4, 900)
    await asyncio.sleep(1.0)
    for task in running[:3]:
        task.cancel()
    await asyncio.sleep(1.0)
    assert await in_flight(vllm_server) == 1
    await engine.resume()
    (survivor,) = [r for r in await asyncio.gather(*running, return_exceptions=True) if isinstance(r, Completion)]
    assert survivor.finish_reason is FinishReason.ABORT


async def test_abort_ends_the_named_requests_alone_and_keeps_what_was_written(engine: VLLMEngine) -> None:
    for _ in range(20):
        ids = [unique(), unique()]
        running = [
            asyncio.create_task(engine.generate([*PROMPT, i], Sampling(max_tokens=900), request_id=ids[i]))
            for i in (0, 1)
        ]
        await asyncio.sleep(0.2)
        await engine.abort(ids[:1])
        first, second = await asyncio.gather(*running)
        assert second.finish_reason is not FinishReason.ABORT
        if first.finish_reason is not FinishReason.STOP:  # a random model may have ended by itself before
            break
    assert first.finish_reason is FinishReason.ABORT
    assert 0 < len(first.token_ids) < 900


async def test_a_prompt_longer_than_the_context_is_refused_with_the_servers_reason(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match=r"status 400: .*(context|length)"):
        await engine.generate([5] * 2000, Sampling(max_tokens=4), request_id=unique())


async def test_the_plain_openai_route_gives_the_same_record(
    vllm_server: VLLMServer, engine: VLLMEngine, judge: Judge
) -> None:
    async with OpenAIEngine(vllm_server.url) as openai:
        completion = await openai.generate(PROMPT, Sampling(max_tokens=16), request_id=unique())
    assert worst(completion, PROMPT, judge, 0) < BOUND


async def test_health_answers(engine: VLLMEngine) -> None:
    await engine.health()
