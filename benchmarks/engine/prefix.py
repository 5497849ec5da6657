"""What the prefix cache saves in a second turn: by vLLM's own counters, and by the clock."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import EngineConfig
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.types import Sampling
from benchmarks import reporting
from benchmarks.engine import goals
from benchmarks.engine.server import Server, serve
from trainer.gpu_report import random_models as models
from trainer.gpu_report.serving import SERVED_NAME

PROMPT_TOKENS = (512, 2048)
COMPLETION_TOKENS, OBSERVATION_TOKENS = 48, 32
COUNTERS_AFTER_S = 0.1
SAME, OTHER = "same version", "another version"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A second turn."""

    latency_s: float  # until its first token, which is its only one
    num_asked: int  # tokens looked for in the prefix cache
    num_found: int


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = models.save(models.make("Qwen3", models.QUICKSTART, tied=True), folder / "model")
        settings = config.model_copy(update={"kv_cache_bytes": 2**30})
        async with serve(path, config=settings, dtype="float32", max_context=4096, log_folder=folder) as server:
            block_tokens = await server.block_tokens()
            rows = [await _row(server, num, block_tokens, repeats=3 if quick else 10) for num in PROMPT_TOKENS]
    columns = ["first prompt, tokens", "second prompt", "new or beyond whole blocks", "computed", "found"]
    columns += [f"computed, {OTHER}", "ms", f"ms, {OTHER}", "times faster"]
    intro = (
        f"\n## Prefix reuse\n\nA second turn's prompt is the first prompt, the {COMPLETION_TOKENS} tokens the engine "
        f"said, and {OBSERVATION_TOKENS} new ones; it asks for one token. Whole blocks are reused, of {block_tokens} "
        "tokens here. `computed` and `found` are vLLM's counters (prefix_cache_queries, prefix_cache_hits), a turn. "
        f"`{OTHER}`: the same prompt under the salt that our client uses after a weight update. "
        "Median (least to greatest).\n\n"
    )
    wrong = [
        f"{kept} and {cold} tokens computed after a prompt of {first}, not {new} and {second}"
        for first, second, new, kept, _, cold, *_ in rows
        if (kept, cold) != (new, second)
    ]
    return intro + reporting.table(columns, rows) + goals.verdict(wrong)


async def _row(server: Server, num_tokens: int, block_tokens: int, *, repeats: int) -> list[object]:
    turns: dict[str, list[Turn]] = defaultdict(list)
    draw, second_tokens = random.Random(num_tokens), 0
    for number in range(repeats + 1):
        prompt = [draw.randrange(models.QUICKSTART.vocab_size) for _ in range(num_tokens)]
        async with VLLMEngine(server.url, model=SERVED_NAME) as engine:
            sampling = Sampling(max_tokens=COMPLETION_TOKENS)
            said = await engine.generate(prompt, sampling, request_id=f"first-{num_tokens}-{number}")
            second = [*prompt, *said.token_ids, *prompt[:OBSERVATION_TOKENS]]
            turns[SAME].append(await _second(engine, server, second, f"same-{num_tokens}-{number}"))
            await engine.control.set_label(str(await engine.version() + 1))
        async with VLLMEngine(server.url, model=SERVED_NAME) as engine:
            turns[OTHER].append(await _second(engine, server, second, f"other-{num_tokens}-{number}"))
        second_tokens = len(second)
    kept, cold = turns[SAME][1:], turns[OTHER][1:]  # the first only warms up
    reusable = (second_tokens - OBSERVATION_TOKENS) // block_tokens * block_tokens
    return [
        *(num_tokens, second_tokens, second_tokens - reusable),
        round(statistics.median(t.num_asked - t.num_found for t in kept)),
        round(statistics.median(t.num_found for t in kept)),
        round(statistics.median(t.num_asked - t.num_found for t in cold)),
        *(reporting.spread([1e3 * t.latency_s for t in some]) for some in (kept, cold)),
        reporting.spread([b.latency_s / a.latency_s for a, b in zip(kept, cold, strict=True)]),
    ]


async def _second(engine: VLLMEngine, server: Server, prompt: list[int], request_id: str) -> Turn:
    before = await _counters(server)
    began = time.perf_counter()
    await engine.generate(prompt, Sampling(max_tokens=1), request_id=request_id)
    latency_s = time.perf_counter() - began
    asked, found = (after - was for after, was in zip(await _counters(server), before, strict=True))
    return Turn(latency_s=latency_s, num_asked=int(asked), num_found=int(found))


async def _counters(server: Server) -> tuple[float, float]:
    await asyncio.sleep(COUNTERS_AFTER_S)
    asked, found = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    return await server.counter(asked), await server.counter(found)
