"""The engine's logprobs against transformers' own forward on the same tokens."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.engine.base import Parity, parity
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.types import Sampling
from benchmarks import reporting
from benchmarks.engine import goals
from benchmarks.engine.server import serve
from trainer.gpu_report import random_models as models
from trainer.gpu_report.serving import SERVED_NAME

DTYPES = ("float32", "bfloat16")
NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 16, 64, 64
SAMPLINGS = {
    "T 1": Sampling(max_tokens=MAX_TOKENS),
    "T 0.7": Sampling(max_tokens=MAX_TOKENS, temperature=0.7),
    "top_p 0.9": Sampling(max_tokens=MAX_TOKENS, top_p=0.9),
    "top_k 20": Sampling(max_tokens=MAX_TOKENS, top_k=20),
    "T 0.7, top_p 0.9, top_k 20": Sampling(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9, top_k=20),
}
SERVERS_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one dtype."""

    architecture: str
    tied: bool
    dtype: str

    def __str__(self) -> str:
        return f"{self.architecture}, {'tied' if self.tied else 'untied'}, {self.dtype}"


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    cases = [
        Case(architecture=architecture, tied=tied, dtype=dtype)
        for dtype, architecture, tied in product(DTYPES, models.ARCHITECTURES, (True, False))
    ]
    if quick:
        cases = [cases[2], cases[-1]]
    slots = asyncio.Semaphore(SERVERS_AT_ONCE)  # a start is one thread's work for 20 s

    async def rows(case: Case) -> list[list[str]]:
        async with slots:
            return await _rows(config, case)

    found = await asyncio.gather(*(rows(case) for case in cases))
    columns = ["model", "logprobs of", "tokens", "max abs", "99 % below", "mean abs", "KL a token"]
    columns += ["beyond the learner's cut"]
    columns += ["against float32: max abs", "mean abs"]
    intro = (
        f"\n## Parity\n\nRandom models of configs/quickstart.yaml's shape with logits of standard deviation "
        f"{models.LOGIT_STD:g}; {NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens, {MAX_TOKENS} sampled tokens each. "
        "Learner: transformers' forward in the same dtype, its logits shaped by temperature, top_k and top_p where "
        "the row says so. KL(engine || learner) is estimated on the sampled tokens. `Beyond the cut`: tokens that "
        "the engine's top_p or top_k kept and the learner's, on its own rounding, would not have; they are left out "
        "of the other columns. The last columns compare with the same weights computed in float32.\n\n"
    )
    lines = [line for some in found for line in some]
    wide = [f"{row[0]}, {row[1]}: {row[3]}" for row in lines if _is_exact(row) and float(row[3]) >= goals.MAX_PARITY]
    return intro + reporting.table(columns, lines) + goals.verdict(wide)


def _is_exact(row: Sequence[str]) -> bool:
    """Whether there is a goal for it."""
    return row[0].endswith("float32") and row[1] in ("prompt", f"sampled, {next(iter(SAMPLINGS))}")


async def _rows(config: EngineConfig, case: Case) -> list[list[str]]:
    model = models.make(case.architecture, models.QUICKSTART, tied=case.tied, dtype=case.dtype, seed=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = models.save(model, folder / "model")
        async with (
            serve(path, config=config, dtype=case.dtype, max_context=1024, log_folder=folder) as server,
            VLLMEngine(server.url, model=SERVED_NAME) as engine,
        ):
            exact = models.make(case.architecture, models.QUICKSTART, tied=case.tied, dtype=case.dtype, seed=1).float()
            rows = [await _scored(engine, model, exact, case)]
            for name in SAMPLINGS:
                rows.append(await _sampled(engine, model, exact, case, name))
    return rows


async def _scored(engine: VLLMEngine, model: Any, exact: Any, case: Case) -> list[str]:
    texts = [[*prompt, *prompt[::-1]] for prompt in _prompts()]
    scored = [value for text in texts for value in await engine.score(text)]
    judges = [await asyncio.to_thread(_judged, judge, texts) for judge in (model, exact)]
    return _row(case, "prompt", scored, *judges)


async def _sampled(engine: VLLMEngine, model: Any, exact: Any, case: Case, name: str) -> list[str]:
    sampling, prompts = SAMPLINGS[name], _prompts()
    completions = await asyncio.gather(
        *(engine.generate(prompt, sampling, request_id=f"{name}-{i}") for i, prompt in enumerate(prompts))
    )
    texts = [[*prompt, *done.token_ids] for prompt, done in zip(prompts, completions, strict=True)]
    judges = [await asyncio.to_thread(_judged, judge, texts, sampling, start=PROMPT_TOKENS) for judge in (model, exact)]
    ours = [logprob for done in completions for logprob in done.behavior_logprobs]
    return _row(case, f"sampled, {name}", ours, *judges)


def _judged(
    model: Any, texts: Sequence[Sequence[int]], sampling: Sampling | None = None, *, start: int = 1
) -> list[float]:
    return [value for text in texts for value in models.logprobs(model, text, sampling, start=start)]


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(models.QUICKSTART.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def _row(case: Case, what: str, ours: Sequence[float], learner: Sequence[float], truth: Sequence[float]) -> list[str]:
    here, exact = _within_cut(ours, learner), _within_cut(ours, truth)
    beyond = sum(value == -math.inf for value in learner)
    apart = [abs(a - b) for a, b in zip(ours, learner, strict=True) if b > -math.inf]
    numbers = (here.max_abs, reporting.percentile(apart, 0.99), here.mean_abs, here.kl)
    return [
        str(case),
        what,
        str(len(ours)),
        *(f"{value:.1e}" for value in numbers),
        str(beyond),
        *(f"{value:.1e}" for value in (exact.max_abs, exact.mean_abs)),
    ]


def _within_cut(ours: Sequence[float], theirs: Sequence[float]) -> Parity:
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if b > -math.inf]
    return parity([a for a, _ in both], [b for _, b in both])
