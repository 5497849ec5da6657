"""Cells of a vLLM engine beside the learner: equal logprobs, and tokens a second through our client.

The engine is started, watched and asked by the code of a run (`agentrl.engine.launch_servers`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from agentrl.config import Config
from agentrl.engine import launch_servers, vllm_command
from agentrl.engine.base import parity as parity_of
from agentrl.engine.parity import ParityBounds, mean_bound
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.errors import MissingDependencyError
from agentrl.supervision.child import Child
from agentrl.training import launch
from agentrl.types import Completion, Sampling
from trainer import packing
from trainer.gpu_report import load, random_models, workload
from trainer.gpu_report.cells import Claims, Measured, NotHere, Setup
from trainer.gpu_report.learner_cells import learner_config

RANDOM_BFLOAT16_BOUND = 1.0
"""Nats on average: random weights amplify rounding as no trained model does. Wrong weights are off by nats."""
START_TIMEOUT_S = 300.0
SIGMA_TOKENS = (64, 256, 1024, 4096)
PROMPT_TOKENS = 64


def engine_config(setup: Setup, *, max_context: int, dtype: str | None = None, **engine: Any) -> Config:
    """The config of an engine and a learner of the model in the cell's folder. Raises NotHere without vLLM."""
    try:
        vllm_command.check_version()
    except MissingDependencyError as error:
        raise NotHere(f"vLLM is not installed: {error}") from error
    config = learner_config(setup, rollout={"max_context": max_context, "max_turn_tokens": max_context // 2})
    own: dict[str, Any] = {"device": setup.device, "start_timeout_s": START_TIMEOUT_S, "max_restarts": 2}
    if (dtype or config.model.dtype) == "bfloat16":
        own["parity_bound"] = RANDOM_BFLOAT16_BOUND
    settings = config.engine.model_validate(config.engine.model_dump() | own | engine)
    model = config.model.model_copy(update={"dtype": dtype or config.model.dtype})
    return config.model_copy(update={"engine": settings, "model": model})


@asynccontextmanager
async def serving(setup: Setup, config: Config) -> AsyncIterator[tuple[VLLMEngine, Child]]:
    """A client of the config's engine, and its process, which is restarted when it dies. Raises EngineError."""
    async with launch_servers.engine_servers(config, model_path=config.model.path, logs=setup.folder) as servers:
        (part,) = launch_servers.parts_of(servers)
        async with launch.watching(part):
            await launch_servers.engines_ready(servers, config.engine)
            async with launch_servers.engine_client(servers, config) as engine:
                assert isinstance(engine, VLLMEngine)
                yield engine, part


def make_model(setup: Setup, size: str, *, dtype: torch.dtype) -> Any:
    """A random model on the cell's device; the same, with a tokenizer, in the cell's folder."""
    model = workload.make_model(size).to(dtype)
    random_models.save(model, setup.folder / workload.MODEL)
    return model.to(setup.device)


def parity(setup: Setup, claims: Claims, *, dtype: str) -> Measured:
    """Logprobs of sampled tokens: those that the engine gave, and those of the learner's own packed pass.

    The sums are over the first tokens of a text: their standard deviation is that of a log importance weight that
    should be 0.
    """
    config = engine_config(setup, max_context=setup.of_size(8192, 1024), dtype=dtype)
    model = make_model(setup, setup.of_size("0.5B", "tiny"), dtype=getattr(torch, dtype))
    num_texts, num_tokens = setup.of_size((16, 4096), (4, 96))
    completions, scored = asyncio.run(_sampled(setup, config, model, num_texts, num_tokens))
    engine = [list(one.behavior_logprobs) for one in completions]
    learner = [
        _by_learner(model, prompt, one) for prompt, one in zip(_prompts(model, num_texts), completions, strict=True)
    ]
    sampled, probe = parity_of(_flat(engine), _flat(learner)), parity_of(*scored)
    bounds = ParityBounds(mean_bound(config))
    for what, found in (("sampled tokens", sampled), ("a prompt", probe)):
        claims.hold(
            not bounds.refuses(found),
            f"{what}: mean |engine - learner| {found.mean_abs:.2g} nats (allowed {bounds.mean:g}), KL {found.kl:.2g} "
            f"({bounds.kl:.2g})",
        )
    differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(engine, learner, strict=True)]
    return {
        "summary": f"mean |engine - learner| {sampled.mean_abs:.2g} nats, largest {sampled.max_abs:.2g}",
        "texts": num_texts,
        "tokens_a_text": num_tokens,
        "allowed_mean_abs_nats": bounds.mean,
        "sampled": _as_dict(sampled),
        "prompt": _as_dict(probe),
        "rms_nats_a_token": math.sqrt(statistics.fmean(d * d for one in differences for d in one)),
        "sigma_of_sums_nats": {
            str(n): statistics.pstdev(sum(one[:n]) for one in differences) for n in SIGMA_TOKENS if n <= num_tokens
        },
    }


async def _sampled(
    setup: Setup, config: Config, model: Any, num_texts: int, num_tokens: int
) -> tuple[list[Completion], tuple[list[float], list[float]]]:
    """Completions, and the logprobs of one prompt by engine and model."""
    async with serving(setup, config) as (engine, _):
        sampling = Sampling(max_tokens=num_tokens)
        asked = [
            engine.generate(prompt, sampling, request_id=f"parity-{index}")
            for index, prompt in enumerate(_prompts(model, num_texts))
        ]
        completions = list(await asyncio.gather(*asked))
        text = _prompts(model, 1)[0]
        scored = await engine.score(text)
    return completions, (scored, random_models.logprobs(model, text))


def _prompts(model: Any, number: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(model.config.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(number)]


def _by_learner(model: Any, prompt: Sequence[int], completion: Completion) -> list[float]:
    """By the pass with which the learner scores a batch."""
    from trainer.gradient import attention
    from trainer.gradient.logprobs import score

    attention.install(model)
    ids_T = torch.tensor([*prompt, *completion.token_ids])
    position_N = torch.arange(len(prompt), len(ids_T))
    one = packing.ActionTensors(
        input_ids_S=ids_T[:-1].to(model.device),
        predictor_N=(position_N - 1).to(model.device),
        target_N=ids_T[position_N].to(model.device),
        behavior_logprob_N=torch.zeros(len(position_N), dtype=torch.float64),
        policy_version_N=torch.zeros(len(position_N), dtype=torch.int64),
    )
    logprobs: list[float] = score(model, packing.join([one])).logprob_N.tolist()
    return logprobs


def _as_dict(found: Any) -> Measured:
    return {f"{name}_nats": getattr(found, name) for name in ("max_abs", "mean_abs", "kl")}


def tokens(setup: Setup, claims: Claims) -> Measured:
    """Generated tokens a second of concurrent sessions through our client, and of the same requests on bare sockets."""
    config = engine_config(setup, max_context=4096, max_num_seqs=setup.of_size(256, 16))
    model = make_model(setup, setup.of_size("0.5B", "tiny"), dtype=workload.dtype_of(torch.device(setup.device)))
    vocab_size = int(model.config.vocab_size)
    del model
    return asyncio.run(_rates(setup, config, claims, vocab_size))


async def _rates(setup: Setup, config: Config, claims: Claims, vocab_size: int) -> Measured:
    num_sessions, max_tokens, rounds = setup.of_size((128, 256, 3), (4, 8, 1))
    sessions = load.scripts(
        num_sessions,
        num_turns=2,
        first_tokens=160,
        observation_tokens=32,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
    )
    async with serving(setup, config) as (engine, _):
        name = launch_servers.SERVED_NAME
        requests = await asyncio.to_thread(load.record, engine.url, name, sessions)  # warms up, too
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(await asyncio.to_thread(load.through_our_client, engine.url, name, sessions))
            bare.append(await asyncio.to_thread(load.through_sockets, engine.url, requests, sessions))
    share = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, bare, strict=True))
    rate = statistics.median(one.tokens_per_s for one in ours)
    return {
        "summary": f"{rate:.4g} tokens/s, {share:.1%} of bare sockets",
        "sessions": num_sessions,
        "tokens_a_call": max_tokens,
        "our_client_tokens_per_s": [one.tokens_per_s for one in ours],
        "bare_tokens_per_s": [one.tokens_per_s for one in bare],
        "share_of_bare": share,
        "our_client_cpu_ms_a_call": statistics.median(one.cpu_ms_a_call for one in ours),
    }


def _flat(lists: Sequence[Sequence[float]]) -> list[float]:
    """All in one list."""
    return list(itertools.chain.from_iterable(lists))
