"""What the precision of the output head does to logprobs and to sequence weights, on either side, in bfloat16."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.engine.base import parity
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.types import Sampling
from benchmarks import reporting
from benchmarks.engine import goals
from trainer.gpu_report import random_models as models
from trainer.gpu_report.serving import SERVED_NAME, serve

DTYPE = "bfloat16"
PROMPT_TOKENS, MAX_TOKENS, NUM_TEXTS = 32, 1024, 24
LENGTHS = (256, 1024)
SHAPES = {"quickstart": models.QUICKSTART, "50 MB": models.BY_SIZE["50 MB"]}
ENGINE_FLAG = "--hf-overrides"


@dataclass(frozen=True, kw_only=True)
class Heads:
    """dtype of the logits."""

    engine: str
    learner: str

    def __str__(self) -> str:
        return f"engine {self.engine}, learner {self.learner}"


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    lines: list[list[str]] = []
    for shape, tied in product(list(SHAPES)[: 1 if quick else None], (True, False)):
        lines += await _rows(config, shape, tied=tied, num_texts=4 if quick else NUM_TEXTS)
    columns = ["model, dtype of the logits", "tokens", "max abs", "mean abs", "rms", "KL a token"]
    columns += [f"sigma of the sum of {length}: measured" for length in LENGTHS]
    columns += [f"rms x sqrt({LENGTHS[-1]})", f"rho at {LENGTHS[-1]}"]
    intro = (
        f"\n## Precision of the output head\n\nRandom {DTYPE} Qwen3 models with logits of standard deviation "
        f"{models.LOGIT_STD:g}; {NUM_TEXTS} prompts of {PROMPT_TOKENS} tokens, {MAX_TOKENS} tokens sampled at "
        "temperature 1 from each. Learner: transformers' forward in the same dtype, with its logits computed from the "
        "final hidden states in bfloat16, as transformers does, or in float32. Sums are of learner - engine over "
        "tokens in a row; rho = exp(-sigma^2) is the ESS ratio of sequence weights without any staleness.\n\n"
    )
    return intro + reporting.table(columns, lines) + goals.verdict(_misses(lines))


def _misses(lines: Sequence[Sequence[str]]) -> list[str]:
    """Models of which two float32 heads are further apart than any other pair."""
    wrong = []
    for start in range(0, len(lines), 4):
        by_rms = sorted(lines[start : start + 4], key=lambda row: float(row[4]))
        if "engine float32, learner float32" not in by_rms[0][0]:
            wrong.append(f"{by_rms[0][0]}: {by_rms[0][4]}")
    return wrong


async def _rows(config: EngineConfig, name: str, *, tied: bool, num_texts: int) -> list[list[str]]:
    model = models.make("Qwen3", SHAPES[name], tied=tied, dtype=DTYPE, seed=1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = models.save(model, folder / "model")
        for engine_head in (DTYPE, "float32"):
            without = None if engine_head == "float32" else ENGINE_FLAG
            async with (
                serve(path, config=config, dtype=DTYPE, max_context=2048, log_folder=folder, without=without) as (
                    url,
                    _,
                ),
                VLLMEngine(url, model=SERVED_NAME) as engine,
            ):
                texts = await _sampled(engine, SHAPES[name].vocab_size, num_texts)
            for learner_head in (DTYPE, "float32"):
                label = f"{name}, {'tied' if tied else 'untied'}: {Heads(engine=engine_head, learner=learner_head)}"
                rows.append(await asyncio.to_thread(_row, label, model, texts, learner_head))
    return rows


async def _sampled(engine: VLLMEngine, vocab_size: int, num_texts: int) -> list[tuple[list[int], list[float]]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_texts)]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    completions = await asyncio.gather(
        *(engine.generate(prompt, sampling, request_id=f"head-{i}") for i, prompt in enumerate(prompts))
    )
    return [
        ([*prompt, *done.token_ids], list(done.behavior_logprobs))
        for prompt, done in zip(prompts, completions, strict=True)
    ]


def _row(label: str, model: Any, texts: Sequence[tuple[list[int], list[float]]], head: str) -> list[str]:
    ours = [logprobs for _, logprobs in texts]
    float32_head = head == "float32"
    theirs = [models.logprobs(model, ids, start=PROMPT_TOKENS, float32_head=float32_head) for ids, _ in texts]
    flat = [[value for text in side for value in text] for side in (ours, theirs)]
    found = parity(flat[0], flat[1])
    apart = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)]
    rms = math.sqrt(statistics.fmean(value**2 for text in apart for value in text))
    sigmas = [statistics.stdev(_sums(apart, length)) for length in LENGTHS]
    numbers = [f"{value:.1e}" for value in (found.max_abs, found.mean_abs, rms, found.kl)]
    spread = [f"{value:.2f}" for value in (*sigmas, rms * math.sqrt(LENGTHS[-1]), math.exp(-(sigmas[-1] ** 2)))]
    return [label, str(len(flat[0])), *numbers, *spread]


def _sums(apart: Sequence[Sequence[float]], length: int) -> list[float]:
    return [sum(text[start : start + length]) for text in apart for start in range(0, len(text) - length + 1, length)]
