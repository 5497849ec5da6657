"""What a running request's old KV entries do to the logprobs after an update, between policies of a real run."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.config.engine import KvOnUpdate
from agentrl.engine.base import parity
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.run_folder import RunFolder
from agentrl.types import Completion, Probe, Sampling
from benchmarks import reporting
from benchmarks.engine import goals, quickstart
from benchmarks.engine.server import Server, serve
from trainer.gpu_report import random_models as models
from trainer.gpu_report.publishing import Publication, Sender
from trainer.gpu_report.serving import SERVED_NAME

NUM_STEPS, MAX_CONTEXT = 3, 4096
TRAIN_DEADLINE_S = 420.0
RUNNING_POLL_S = 0.02
TRAIN = [
    *(f"train.steps={NUM_STEPS}", "learner.save_every=1", "name=kv"),
    *("eval.num_tasks=1", "eval.samples_per_task=1", *quickstart.WARMSTART),
]


@dataclass(frozen=True, kw_only=True)
class EpisodeKind:
    """What runs across an update."""

    name: str
    num_running: int
    max_tokens: int
    update_after_s: float  # all of them run by then
    repeats: int


KINDS = (
    EpisodeKind(name="the rest of a turn", num_running=12, max_tokens=96, update_after_s=0.0, repeats=4),
    EpisodeKind(name="a long answer", num_running=16, max_tokens=320, update_after_s=0.3, repeats=1),
)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Consecutive versions of a policy, the contexts its episodes ended in, and the token that ends a turn."""

    versions: list[Any]
    prompts: list[list[int]]
    turn_end: int


@dataclass(kw_only=True)
class Crossed:
    """Logprobs of requests that ran across updates: as recorded, and under either policy with KV entries of its own."""

    num_requests: int = 0
    recorded: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)  # the same tokens under the policy before the update
    gaps_s: list[float] = field(default_factory=list)


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        policies = await _train(folder)
        first = policies.versions[0]
        first.config.eos_token_id = first.generation_config.eos_token_id = None  # stops are ours to ask for
        path = models.save(first, folder / "served")
        async with serve(path, config=config, dtype="float32", max_context=MAX_CONTEXT, log_folder=folder) as server:
            rows = [
                _row(f"{kv}, {kind.name}, {jump} step{'s' * (jump > 1)}", crossed)
                for kind in (KINDS[1:] if quick else KINDS)
                for jump in (1, NUM_STEPS)
                for kv, crossed in (await _both(server, config, policies, kind, jump=jump)).items()
            ]
    columns = ["KV, after the update, distance", "requests", "tokens", "max abs", "mean abs", "KL a token"]
    columns += ["policies apart: mean abs", "KL a token", "gap, s"]
    turn, answer = KINDS
    intro = (
        f"\n## KV entries across an update\n\n{NUM_STEPS} consecutive policies of a real run of "
        f"configs/quickstart.yaml ({', '.join(quickstart.WARMSTART)}); requests continue contexts of its own "
        "episodes, and an update comes while they run. For the tokens after the update, the logprob recorded at "
        "sampling is compared with transformers' under the new weights alone. `Policies apart`: new against old "
        "weights, both "
        f"on these tokens with KV entries of their own. {turn.name.capitalize()}: until the turn's end token, "
        f"{turn.num_running} requests at once; {answer.name}: {answer.max_tokens} tokens, "
        f"{answer.num_running} at once.\n\n"
    )
    misses = [f"{row[0]}: {row[3]}" for row in rows if row[0].startswith("recompute") and not _below(row, 3)]
    misses += [f"{row[0]}: {row[4]}" for row in rows if row[0].startswith("stale") and not _below(row, 4, than=6)]
    return intro + reporting.table(columns, rows) + goals.verdict(misses)


def _below(row: Sequence[str], at: int, *, than: int | None = None) -> bool:
    """A cell against another of its row, or against the goal of parity."""
    return row[1] != "0" and float(row[at]) < (goals.MAX_PARITY if than is None else float(row[than]))


async def _train(folder: Path) -> Policies:
    """A short real run. Raises RuntimeError with the end of its output."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = folder / "model"
    command = ("agentrl", "train", quickstart.CONFIG, f"out_dir={folder}", f"model.path={model}", *TRAIN)
    await quickstart.run("the training run", *command, timeout_s=TRAIN_DEADLINE_S)
    run = RunFolder.open(folder / "kv")
    folders = [model, *(run.checkpoints / f"step_{step}" for step in range(1, NUM_STEPS + 1))]
    return Policies(
        versions=[AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval() for path in folders],
        prompts=_prompts(run),
        turn_end=AutoTokenizer.from_pretrained(model).eos_token_id,
    )


def _prompts(run: RunFolder) -> list[list[int]]:
    """Of every episode, what its last turn continued."""
    groups = [group for step in run.trajectory_steps() for group in run.read_trajectories(step)]
    found = []
    for trajectory in (one for group in groups for one in group.trajectories):
        *earlier, last = trajectory.turns
        ids = [i for turn in earlier for i in (*turn.observation_ids, *turn.completion.token_ids)]
        found.append([*ids, *last.observation_ids])
    return found


async def _both(
    server: Server, config: EngineConfig, policies: Policies, kind: EpisodeKind, *, jump: int
) -> dict[KvOnUpdate, Crossed]:
    found: dict[KvOnUpdate, Crossed] = {"stale": Crossed(), "recompute": Crossed()}
    for _ in range(kind.repeats):
        for kv, crossed in found.items():
            async with VLLMEngine(server.url, model=SERVED_NAME, updates=UpdateSettings(kv_on_update=kv)) as engine:
                first = policies.versions[0]
                await _publish(engine, config, first, await asyncio.to_thread(models.probe, first))
                for at in range(0, NUM_STEPS, jump):
                    await _cross(crossed, engine, server, config, policies, kind, at=at, then=at + jump)
    return found


async def _cross(
    crossed: Crossed,
    engine: VLLMEngine,
    server: Server,
    config: EngineConfig,
    policies: Policies,
    kind: EpisodeKind,
    *,
    at: int,
    then: int,
) -> None:
    """Bring version `then` while requests run under `at`, and note what became of them."""
    new = policies.versions[then]
    probe = await asyncio.to_thread(models.probe, new)  # now: the requests do not wait for it
    prompts = random.Random(crossed.num_requests + at).sample(policies.prompts, kind.num_running)
    stop = (policies.turn_end,) if kind is KINDS[0] else ()
    sampling = Sampling(max_tokens=kind.max_tokens, stop_token_ids=stop)
    running = [
        asyncio.create_task(engine.generate(prompt, sampling, request_id=f"kv-{time.monotonic_ns()}"))
        for prompt in prompts
    ]
    while await server.counter("vllm:num_requests_running") < kind.num_running and not any(t.done() for t in running):
        await asyncio.sleep(RUNNING_POLL_S)
    await asyncio.sleep(kind.update_after_s)
    crossed.gaps_s.append((await _publish(engine, config, new, probe)).update.gap_s)
    for prompt, completion in zip(prompts, await asyncio.gather(*running), strict=True):
        await asyncio.to_thread(_note, crossed, prompt, completion, policies.versions[at], new)


async def _publish(engine: VLLMEngine, config: EngineConfig, model: Any, probe: Probe) -> Publication:
    with tempfile.TemporaryDirectory() as folder:
        sender = Sender(model, mode="safetensors", config=config, folder=Path(folder))
        return await sender.publish(engine, await engine.version() + 1, probe)


def _note(crossed: Crossed, prompt: Sequence[int], completion: Completion, old: Any, new: Any) -> None:
    if len(completion.version_spans) != 2:
        return
    start = completion.version_spans[1].start
    ids = [*prompt, *completion.token_ids]
    crossed.num_requests += 1
    crossed.recorded += completion.behavior_logprobs[start:]
    crossed.fresh += models.logprobs(new, ids, start=len(prompt) + start)
    crossed.before += models.logprobs(old, ids, start=len(prompt) + start)


def _row(name: str, crossed: Crossed) -> list[str]:
    if not crossed.recorded:
        return [name, "0", *("no request ran across" for _ in range(7))]
    found, apart = parity(crossed.recorded, crossed.fresh), parity(crossed.before, crossed.fresh)
    return [
        name,
        str(crossed.num_requests),
        str(len(crossed.recorded)),
        *(f"{value:.1e}" for value in (found.max_abs, found.mean_abs, found.kl)),
        *(f"{value:.1e}" for value in (apart.mean_abs, apart.kl)),
        f"{statistics.median(crossed.gaps_s):.3f}",
    ]
