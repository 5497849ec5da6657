"""The engine client against the real vLLM server, compared with transformers."""

import asyncio
import copy
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.config.engine import KvOnUpdate
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError, WeightSyncError
from agentrl.types import Completion, FinishReason, Sampling
from tests.agentrl.engine.judge import PROMPT, Judge, difference, worst
from tests.agentrl.engine.test_engine_failures import until_streaming
from tests.conftest import VLLMServer
from tests.device import cpu_engine_only, parity_bound

pytestmark = pytest.mark.engine

BOUND = parity_bound()


async def connect(server: VLLMServer, judge: Judge, kv_on_update: KvOnUpdate) -> AsyncIterator[VLLMEngine]:
    """A client whose engine holds model 0, whatever an earlier test left."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        (await http.post("/resume")).raise_for_status()
    updates = UpdateSettings(kv_on_update=kv_on_update, parity_bound=BOUND)
    async with VLLMEngine(server.url, model=server.model, updates=updates) as engine:
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


@pytest.fixture
def long_answer() -> int:
    """Tokens during which there is time for two updates."""
    return 900


def unique() -> str:
    return uuid.uuid4().hex


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


async def test_a_stop_text_ends_the_turn_and_its_last_token_is_kept_whole(
    engine: VLLMEngine, judge: Judge, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    version = await engine.version()
    for stop in ("7", "re", "</code>"):
        sampling = Sampling(max_tokens=400, stop=(stop,))
        completion = await engine.generate(PROMPT, sampling, request_id=unique())
        text, before = tokenizer.decode(completion.token_ids), tokenizer.decode(completion.token_ids[:-1])
        assert (stop in text) == (completion.finish_reason is FinishReason.STOP and stop in text)
        assert stop not in before
        assert worst(completion, PROMPT, judge, version) < BOUND


async def test_top_p_and_top_k_have_the_logprobs_of_what_was_sampled_from(engine: VLLMEngine, judge: Judge) -> None:
    import torch

    sampling = Sampling(max_tokens=24, temperature=0.7, top_k=5)
    completion = await engine.generate(PROMPT, sampling, request_id=unique())
    tokens = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        logits = judge._models[0](tokens).logits[0, len(PROMPT) - 1 : -1] / 0.7
    kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], float("-inf")).log_softmax(-1)
    expected = kept.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].tolist()
    assert difference(completion.behavior_logprobs, expected) < BOUND


async def test_greedy_tokens_are_certain(engine: VLLMEngine) -> None:
    greedy = Sampling(max_tokens=8, temperature=0)
    first, second = [await engine.generate(PROMPT, greedy, request_id=unique()) for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert set(first.behavior_logprobs) == {0.0}


async def many(engine: VLLMEngine, count: int, max_tokens: int) -> list[asyncio.Task[Completion]]:
    sampling = Sampling(max_tokens=max_tokens)
    return [
        asyncio.create_task(engine.generate([*PROMPT, i], sampling, request_id=unique())) for i in range(5, 5 + count)
    ]


async def test_running_requests_go_on_and_every_token_names_its_weights(
    engine: VLLMEngine, judge: Judge, long_answer: int
) -> None:
    version = await engine.version()
    refs = [judge.ref(version + step, step % 2) for step in (1, 2)]
    running = await many(engine, 8, long_answer)
    await until_streaming(engine, 150)
    for ref in refs:  # as soon as possible: a random model may end a request at every token
        update = await engine.update_weights(ref)
        assert 0 < update.gap_s < 30
        assert update.parity is not None
        assert update.parity.max_abs < BOUND
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


async def test_stale_keeps_running_requests_on_their_old_kv(
    stale_engine: VLLMEngine, judge: Judge, long_answer: int
) -> None:
    version = await stale_engine.version()
    ref = judge.ref(version + 1, 1)
    running = await many(stale_engine, 8, long_answer)
    await until_streaming(stale_engine, 150)
    await stale_engine.update_weights(ref)
    completions = await asyncio.gather(*running)
    across = [(i, c) for i, c in enumerate(completions) if len(c.version_spans) == 2]
    assert across
    # Fresh KV is not what they were sampled with: the very difference that `recompute` removes.
    assert max(worst(completion, [*PROMPT, 5 + i], judge, version) for i, completion in across) > BOUND


async def test_other_weights_on_disk_than_the_learners_are_a_sync_error(engine: VLLMEngine, judge: Judge) -> None:
    version = await engine.version() + 1
    right, wrong = judge.ref(version, 0), judge.ref(version, 1)
    with pytest.raises(WeightSyncError, match="does not hold the learner's weights"):
        await engine.update_weights(replace(wrong, probe=right.probe))


@pytest.mark.parametrize(
    "wrong",
    [
        "one layer",
        "head permuted",
        pytest.param("rounded", marks=cpu_engine_only("a GPU's bound is wider than bfloat16's rounding of this model")),
    ],
)
async def test_weights_that_are_wrong_in_part_are_refused_by_the_probe_alone(
    engine: VLLMEngine, judge: Judge, tmp_path: Path, wrong: str
) -> None:
    right, other = copy.deepcopy(judge._models[0]), judge._models[1]
    head = right.get_output_embeddings().weight.data
    if wrong == "one layer":
        right.model.layers[1].load_state_dict(other.model.layers[1].state_dict())
    elif wrong == "head permuted":
        head.copy_(head.roll(1, dims=0))
    else:
        right = right.bfloat16().float()
    right.save_pretrained(tmp_path)
    ref = judge.ref(await engine.version() + 1, 0)
    with pytest.raises(WeightSyncError, match="does not hold the learner's weights"):
        await engine.update_weights(replace(ref, update_info={"path": str(tmp_path)}))


async def test_weights_that_cannot_be_loaded_leave_the_ones_before_in_place(
    engine: VLLMEngine, judge: Judge, tmp_path: Path, long_answer: int
) -> None:
    version = await engine.version()
    running = await many(engine, 4, long_answer // 2)
    with pytest.raises(WeightSyncError, match=rf"no model.*safetensors.*continues with version {version}"):
        await engine.update_weights(replace(judge.ref(version + 1, 1), update_info={"path": str(tmp_path)}))
    for i, completion in enumerate(await asyncio.gather(*running)):
        assert set(completion.policy_versions()) == {version}
        assert worst(completion, [*PROMPT, 5 + i], judge, version) < BOUND
    await engine.update_weights(judge.ref(version + 1, 1))
    completion = await engine.generate(PROMPT, Sampling(max_tokens=16), request_id=unique())
    assert worst(completion, PROMPT, judge, version) < BOUND


async def test_weights_that_cannot_be_loaded_and_none_before_leave_the_engine_paused(
    vllm_server: VLLMServer, engine: VLLMEngine, judge: Judge, tmp_path: Path
) -> None:
    ref = judge.ref(await engine.version() + 1, 0)
    async with VLLMEngine(vllm_server.url) as other:
        with pytest.raises(WeightSyncError, match=r"no model.*safetensors"):
            await other.update_weights(replace(ref, update_info={"path": str(tmp_path)}))
        with pytest.raises(WeightSyncError, match=r"no model.*safetensors"):
            await other.generate(PROMPT, Sampling(max_tokens=2), request_id=unique())
    with pytest.raises(EngineError, match="is paused"):
        async with VLLMEngine(vllm_server.url):
            pass


async def in_flight(server: VLLMServer) -> int:
    """How many requests the server tracks. Ends them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        reply: dict[str, Any] = (await http.post("/abort_requests", json={})).json()
    return int(reply["aborted"])


async def test_cancelling_a_call_aborts_its_request(vllm_server: VLLMServer, engine: VLLMEngine) -> None:
    for wait_s in (0.5, 5.0, 30.0):  # until the server has the requests, and until it has their aborts
        await engine.control.pause(clear_cache=False)
        running = await many(engine, 4, 900)
        await asyncio.sleep(wait_s)
        for task in running[:3]:
            task.cancel()
        await asyncio.sleep(wait_s)
        left = await in_flight(vllm_server)
        await engine.control.resume()
        if left == 1:
            break
    assert left == 1
    (survivor,) = [r for r in await asyncio.gather(*running, return_exceptions=True) if isinstance(r, Completion)]
    assert survivor.finish_reason is FinishReason.ABORT


async def test_abort_ends_the_named_requests_alone_and_keeps_what_was_written(engine: VLLMEngine) -> None:
    for number in range(1, 21):
        ids = [unique(), unique()]
        running = [
            asyncio.create_task(engine.generate([*PROMPT, i], Sampling(max_tokens=900), request_id=ids[i]))
            for i in (0, 1)
        ]
        await asyncio.sleep(0.1 * number)
        await engine.control.abort(ids[:1])
        first, second = await asyncio.gather(*running)
        assert second.finish_reason is not FinishReason.ABORT
        # A random model may have ended by itself before; a busy machine may have written nothing yet.
        if first.finish_reason is FinishReason.ABORT and first.token_ids:
            break
    assert first.finish_reason is FinishReason.ABORT
    assert 0 < len(first.token_ids) < 900


async def test_a_prompt_longer_than_the_context_is_refused_with_the_servers_reason(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match=r"2000.*longer than the maximum model length"):
        await engine.generate([5] * 2000, Sampling(max_tokens=4), request_id=unique())


async def test_health_answers(engine: VLLMEngine) -> None:
    await engine.health()
