"""The ESS ratio that rounding alone leaves: engine and learner in bfloat16 with the same weights, by length.

The model is random and has real widths. Both sides read the same random text; at each position a token is drawn from
what the *engine* computes there, and both sides' log-probabilities of it are compared. So tokens are on-policy without
being generated one by one. The engine lists its likeliest tokens only (`TOP`), and draws are among these.
Shapes: _T positions of a text, _V vocabulary, _D hidden size, _K listed tokens.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import torch
from torch import Tensor

from agentrl.config import EngineConfig
from agentrl.engine.parity import log_ratio_at
from agentrl.types import SumSigma
from benchmarks import reporting
from benchmarks.engine import goals
from benchmarks.engine.head import DTYPE, ENGINE_FLAG, HEADS
from trainer.gpu_report import random_models as models
from trainer.gpu_report.serving import SERVED_NAME, serve

WIDTHS = models.Shape(
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=2,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32000,
)
"""Of TinyLlama-1.1B and RhoMath-1B, which have 22 layers."""
INITIALIZER_RANGE = 0.02  # theirs
ENTROPIES = (0.55, 2.8)
"""Nats a token: of a policy that knows its answers, and of one that is still exploring."""
NUM_TEXTS, TEXT_TOKENS = 4, 4096
TOP = 20
SUM_LENGTHS = (256, 2048)
LENGTHS = (2048, 8192, 16384)
CHUNK = 512
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens drawn from an engine's distributions, one for each position of each text."""

    token_T: list[Tensor]
    logprob_T: list[Tensor]  # the engine's, float64
    listed: float  # mean probability of all tokens that it listed


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    shape = models.QUICKSTART if quick else WIDTHS
    lines: list[list[str]] = []
    for entropy in ENTROPIES:
        untrained = models.make("Llama", shape, tied=False, dtype=DTYPE, seed=1, initializer_range=INITIALIZER_RANGE)
        model = with_entropy(untrained, entropy)
        draw = random.Random(0)
        size = model.config.vocab_size
        texts = [[draw.randrange(size) for _ in range(TEXT_TOKENS)] for _ in range(NUM_TEXTS)]
        with tempfile.TemporaryDirectory() as folder:
            drawn = await _engine(config, model, texts, Path(folder))
        lines += await asyncio.to_thread(_rows, model, texts, drawn, entropy)
    columns = ["entropy, dtype of the logits", "tokens", "listed", "rms a token", "bias a token"]
    columns += [f"sigma of the sum of {length}" for length in SUM_LENGTHS]
    columns += [f"rho at {length}" for length in LENGTHS]
    intro = (
        f"\n## ESS ratio without lag\n\nA random {DTYPE} Llama of {shape.num_layers} layers, width {shape.hidden_size} "
        f"and {shape.vocab_size} tokens, its logits scaled to the row's entropy. {NUM_TEXTS} texts of {TEXT_TOKENS} "
        "random tokens; at each position a token is drawn from the engine's distribution (among its "
        f"{TOP} likeliest; `listed` is the probability of all of these). Engine: vLLM as a run starts it, and with "
        "logits in bfloat16. Learner: its packed forward, and its output head in float32 or bfloat16. `logits alone`: "
        "the learner's hidden states on both sides; a bfloat16 head against a float32 one, and that one against "
        f"float64 (the first {CHUNK} positions). Bias and sums are of learner - engine. "
        f"rho = exp(-sigma^2); sigma of more tokens than a column measures is scaled by the square "
        "root.\n\n"
    )
    return intro + reporting.table(columns, lines) + goals.verdict(_misses(lines))


def with_entropy(model: Any, entropy: float) -> Any:
    """The model, its final norm scaled so that the next token's mean entropy is `entropy`, in nats."""
    logits_TV = models.logits(model, [7 * i % model.config.vocab_size for i in range(models.PROBE_TOKENS)])

    def mean_entropy(scale: float) -> float:
        log_pi_TV = (scale * logits_TV).log_softmax(dim=-1)
        return float(-(log_pi_TV.exp() * log_pi_TV).sum(dim=-1).mean())

    low, high = 0.01, 100.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_entropy(middle) > entropy else (low, middle)
    with torch.no_grad():
        model.model.norm.weight.mul_(low)
    return model


async def _engine(config: EngineConfig, model: Any, texts: Sequence[list[int]], folder: Path) -> dict[str, Drawn]:
    """What the engine draws under each head."""
    path = models.save(model, folder / "model")
    found = {}
    for head in HEADS:
        without = ENGINE_FLAG if head == DTYPE else None
        context = len(texts[0]) + 16
        serving = serve(path, config=config, dtype=DTYPE, max_context=context, log_folder=folder, without=without)
        async with serving as (url, _), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            found[head] = _draw([await _listed(session, url, text) for text in texts])
    return found


async def _listed(session: aiohttp.ClientSession, url: str, text: list[int]) -> list[dict[int, float]]:
    """Log-probability of the likeliest tokens after each token but the last."""
    sampling = {"max_tokens": 1, "prompt_logprobs": TOP, "detokenize": False}
    body = {"model": SERVED_NAME, "token_ids": text, "sampling_params": sampling}
    async with session.post(f"{url}/inference/v1/generate", json=body) as reply:
        reply.raise_for_status()
        entries = (await reply.json())["prompt_logprobs"][1:]
    # The text's own token is listed too, likely or not.
    likeliest = (sorted(one.items(), key=lambda item: item[1]["logprob"])[-TOP:] for one in entries)
    return [{int(token): float(entry["logprob"]) for token, entry in one} for one in likeliest]


def _draw(listed: Sequence[Sequence[dict[int, float]]]) -> Drawn:
    """One token a position, with the same random numbers whatever the head."""
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs, shares = [], [], []
    for text in listed:
        token_TK = torch.tensor([list(one) for one in text])
        logprob_TK = torch.tensor([list(one.values()) for one in text], dtype=torch.float64)
        chosen_T1 = torch.multinomial(logprob_TK.exp(), 1, generator=generator)
        tokens.append(token_TK.gather(1, chosen_T1)[:, 0])
        logprobs.append(logprob_TK.gather(1, chosen_T1)[:, 0])
        shares.append(float(logprob_TK.exp().sum(dim=1).mean()))
    return Drawn(token_T=tokens, logprob_T=logprobs, listed=statistics.fmean(shares))


def _rows(model: Any, texts: Sequence[list[int]], drawn: dict[str, Drawn], entropy: float) -> list[list[str]]:
    exact = HEADS[-1]
    learner: dict[tuple[str, str], list[Tensor]] = {pair: [] for pair in product(HEADS, HEADS)}
    judges: list[Tensor] = []
    for number, text in enumerate(texts):
        targets = {engine: one.token_T[number] for engine, one in drawn.items()}
        hidden_TD = _hidden(model, text)
        for pair, logprob_T in _learner(model, hidden_TD, targets):
            learner[pair].append(logprob_T)
        judges.append(_float64_head(model, hidden_TD[:CHUNK], targets[exact][:CHUNK]))
    rows = []
    for engine, head in product(HEADS, HEADS):
        apart = [b - a for a, b in zip(drawn[engine].logprob_T, learner[engine, head], strict=True)]
        rows.append(_row(f"{entropy:g}: engine {engine}, learner {head}", apart, drawn[engine].listed))
    alone = [b - a for a, b in zip(learner[exact, exact], learner[exact, DTYPE], strict=True)]
    rounded = _row(f"{entropy:g}: logits alone, bfloat16", alone, drawn[exact].listed)
    ours = [one[: len(judge)] - judge for one, judge in zip(learner[exact, exact], judges, strict=True)]
    return [*rows, rounded, _row(f"{entropy:g}: logits alone, float32", ours, drawn[exact].listed)]


@torch.no_grad()
def _hidden(model: Any, text: list[int]) -> Tensor:
    """The learner's final hidden states at each token but the last. [T, D]"""
    from trainer.gradient import attention

    attention.install(model)
    ids_T = torch.tensor(text[:-1])
    arguments = attention.segment_arguments((0, len(ids_T)), ids_T.device)
    positions_T = torch.arange(len(ids_T))
    hidden_TD: Tensor = model.base_model(ids_T[None], position_ids=positions_T[None], use_cache=False, **arguments)[0][
        0
    ]
    return hidden_TD


@torch.no_grad()
def _float64_head(model: Any, hidden_CD: Tensor, target_C: Tensor) -> Tensor:
    """Logprobs of the targets, the output head in float64. [C]"""
    weight_VD = model.get_output_embeddings().weight.double()
    log_pi_CV = (hidden_CD.double() @ weight_VD.t()).log_softmax(dim=-1)
    return log_pi_CV.gather(1, target_C[:, None])[:, 0]


@torch.no_grad()
def _learner(model: Any, hidden_TD: Tensor, targets: dict[str, Tensor]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Logprobs of the targets drawn under each of the engine's heads, by each of the learner's: (engine, head), [T]"""
    from trainer.gradient.logprobs import float32_logits

    weight_VD = model.get_output_embeddings().weight
    for head in HEADS:
        found: dict[str, list[Tensor]] = {engine: [] for engine in targets}
        for start in range(0, len(hidden_TD), CHUNK):
            rows = hidden_TD[start : start + CHUNK]
            logits_CV = (rows @ weight_VD.t()).float() if head == DTYPE else float32_logits(rows, weight_VD)
            log_pi_CV = logits_CV.log_softmax(dim=-1)
            for engine, token_T in targets.items():
                found[engine].append(log_pi_CV.gather(1, token_T[start : start + CHUNK, None])[:, 0].double())
        for engine, parts in found.items():
            yield (engine, head), torch.cat(parts)


def _row(label: str, apart: Sequence[Tensor], listed: float) -> list[str]:
    every_T = torch.cat(list(apart))
    measured = [
        SumSigma(length=length, sigma=statistics.stdev(sums), num_sums=len(sums))
        for length in SUM_LENGTHS
        if len(sums := _sums(apart, length)) > 1
    ]
    rhos = [found.rho for length in LENGTHS if (found := log_ratio_at(length, measured))]
    sigmas = [found.sigma for length in SUM_LENGTHS if (found := log_ratio_at(length, measured))]
    numbers = [f"{listed:.2f}", f"{float(every_T.square().mean().sqrt()):.2g}", f"{float(every_T.mean()):+.1e}"]
    return [label, str(len(every_T)), *numbers, *(f"{number:.2g}" for number in (*sigmas, *rhos))]


def _sums(apart: Sequence[Tensor], length: int) -> list[float]:
    return [float(part.sum()) for one_T in apart for part in one_T.split(length) if len(part) >= length - 1]


def _misses(lines: Sequence[Sequence[str]]) -> list[str]:
    """Entropies at which two float32 heads leave a smaller ESS ratio at the longest length than two bfloat16 ones."""
    groups = [lines[start : start + 6] for start in range(0, len(lines), 6)]
    return [f"{rows[3][0]}: {rows[3][-1]}" for rows in groups if float(rows[3][-1]) < float(rows[0][-1])]
