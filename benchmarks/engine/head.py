"""What the precision of the output head does to logprobs and to sequence weights, on either side, in bfloat16."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.engine.base import parity
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.types import Sampling
from benchmarks import reporting
from benchmarks.engine import goals, quickstart
from trainer.gpu_report import random_models as models
from trainer.gpu_report.serving import SERVED_NAME, serve

DTYPE = "bfloat16"
HEADS = (DTYPE, "float32")
PROMPT_TOKENS, MAX_TOKENS, NUM_TEXTS = 32, 1024, 16
LENGTHS = (256, 1024)
ENGINE_FLAG = "--hf-overrides"
WARMSTART_DEADLINE_S = 900.0


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    makers: dict[str, Callable[[Path], Any]] = {
        "random, 4 layers of 128": lambda folder: models.make(
            "Qwen3", models.QUICKSTART, tied=False, dtype=DTYPE, seed=1
        ),
        "random, 6 layers of 384": lambda folder: models.make(
            "Qwen3", models.BY_SIZE["50 MB"], tied=False, dtype=DTYPE, seed=1
        ),
    }
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not quick:
            await _warm_start(folder / "trained")
            makers = {"trained, 4 layers of 128, tied": _trained, **makers}
        for name, make in makers.items():
            lines += await _rows(config, name, make(folder / "trained"), folder, num_texts=4 if quick else NUM_TEXTS)
    columns = ["model, dtype of the logits", "tokens", "max abs", "mean abs", "rms", "KL a token"]
    columns += [f"sigma of the sum of {length}" for length in LENGTHS]
    columns += [f"rms x sqrt({LENGTHS[-1]})", f"rho at {LENGTHS[-1]}"]
    intro = (
        f"\n## Precision of the output head\n\n{DTYPE} Qwen3 models: the one of configs/quickstart.yaml "
        f"({', '.join(quickstart.WARMSTART)}) and random ones with logits of standard deviation {models.LOGIT_STD:g}. "
        f"{NUM_TEXTS} texts of {PROMPT_TOKENS} random and {MAX_TOKENS} sampled tokens each; engine and learner score "
        "the same tokens under each head. Learner: transformers' forward in the same dtype, with its logits computed "
        "from the final hidden states in bfloat16, as transformers does, or in float32. Sums are of learner - engine "
        "over tokens in a row: their standard deviation; rho = exp(-sigma^2) is the ESS ratio of sequence weights "
        "without any staleness.\n\n"
    )
    return intro + reporting.table(columns, lines) + goals.verdict(_misses(lines))


def _misses(lines: Sequence[Sequence[str]]) -> list[str]:
    """Models of which two float32 heads are further apart than two bfloat16 ones."""
    groups = [lines[start : start + 4] for start in range(0, len(lines), 4)]
    return [f"{rows[-1][0]}: {rows[-1][4]}" for rows in groups if float(rows[-1][4]) > float(rows[0][4])]


async def _warm_start(folder: Path) -> None:
    """The quickstart's model. Raises RuntimeError with the end of the output."""
    command = ("trainer.warmstart", quickstart.CONFIG, f"model.path={folder}", *quickstart.WARMSTART)
    await quickstart.run("the warm start", *command, timeout_s=WARMSTART_DEADLINE_S)


def _trained(folder: Path) -> Any:
    """The model of `folder`, which no longer ends a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


async def _rows(config: EngineConfig, name: str, model: Any, folder: Path, *, num_texts: int) -> list[list[str]]:
    path = models.save(model, folder / name.replace(" ", "-"))
    texts: list[list[int]] = []
    ours: dict[str, list[list[float]]] = {}
    for head in reversed(HEADS):
        without = ENGINE_FLAG if head == DTYPE else None
        options: dict[str, Any] = {"config": config, "dtype": DTYPE, "max_context": 2048, "without": without}
        async with (
            serve(path, log_folder=folder, **options) as (url, _),
            VLLMEngine(url, model=SERVED_NAME) as engine,
        ):
            texts = texts or await _sampled(engine, model.config.vocab_size, num_texts)
            ours[head] = [(await engine.score(text))[PROMPT_TOKENS - 1 :] for text in texts]
    theirs = {head: await asyncio.to_thread(_learner, model, texts, head) for head in HEADS}
    return [
        _row(f"{name}: engine {engine_head}, learner {learner_head}", ours[engine_head], theirs[learner_head])
        for engine_head, learner_head in product(HEADS, HEADS)
    ]


async def _sampled(engine: VLLMEngine, vocab_size: int, num_texts: int) -> list[list[int]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(5, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_texts)]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    completions = await asyncio.gather(
        *(engine.generate(prompt, sampling, request_id=f"head-{i}") for i, prompt in enumerate(prompts))
    )
    return [[*prompt, *done.token_ids] for prompt, done in zip(prompts, completions, strict=True)]


def _learner(model: Any, texts: Sequence[Sequence[int]], head: str) -> list[list[float]]:
    is_exact = head == "float32"
    return [models.logprobs(model, text, start=PROMPT_TOKENS, float32_head=is_exact) for text in texts]


def _row(label: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[str]:
    apart = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)]
    found = parity([value for text in ours for value in text], [value for text in theirs for value in text])
    rms = math.sqrt(statistics.fmean(value**2 for text in apart for value in text))
    sigmas = [statistics.stdev(_sums(apart, length)) for length in LENGTHS]
    numbers = [f"{found.max_abs:.2f}", f"{found.mean_abs:.4f}", f"{rms:.4f}", f"{found.kl:.1e}"]
    spread = [f"{value:.2f}" for value in (*sigmas, rms * math.sqrt(LENGTHS[-1]), math.exp(-(sigmas[-1] ** 2)))]
    return [label, str(sum(map(len, apart))), *numbers, *spread]


def _sums(apart: Sequence[Sequence[float]], length: int) -> list[float]:
    return [sum(text[start : start + length]) for text in apart for start in range(0, len(text) - length + 1, length)]
