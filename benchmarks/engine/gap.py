"""How long new weights pause generation, compared with the time of copying their bytes once."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from agentrl.config import EngineConfig
from agentrl.config.engine import KvOnUpdate
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_command import TRANSFER_BACKENDS
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.vllm_generation import sampling_body
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.types import Probe, Sampling
from benchmarks import reporting
from benchmarks.engine import goals
from benchmarks.engine.server import Server, serve
from trainer.gpu_report import random_models as models
from trainer.gpu_report.publishing import DEADLINE_S, Publication, Sender, modes
from trainer.gpu_report.serving import SERVED_NAME, outlasting

NUM_RUNNING, PROMPT_TOKENS, MAX_CONTEXT = 16, 64, 4096
QUICK_SIZES, SIZES, LARGE_SIZES = ("1 MB", "50 MB"), ("1 MB", "50 MB", "500 MB"), ("1 MB", "50 MB", "500 MB", "2 GB")
RUNNING_POLL_S = 0.05
STEP_OF_WEIGHTS = 1.0001


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One update while requests ran."""

    publication: Publication
    silence_s: float  # the longest without a token of a running request, from just before the update on


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size of model, one mode, one KV policy."""

    name: str
    idle: Sequence[Publication]
    stalls: Sequence[Stall]
    step_s: float  # usual wait of a running request for a token
    floor_s: float

    def cells(self) -> list[str]:
        """Of the table."""
        gaps_s = [stall.publication.update.gap_s for stall in self.stalls]
        gap_s, num_bytes = statistics.median(gaps_s), self.idle[0].update.num_bytes
        return [
            self.name,
            f"{num_bytes / 1e6:.1f}",
            reporting.spread([publication.update.gap_s for publication in self.idle], 3),
            reporting.spread(gaps_s, 3),
            reporting.spread([stall.silence_s for stall in self.stalls], 3),
            f"{self.step_s:.3f}",
            f"{num_bytes / 1e6 / gap_s:.0f}",
            f"{self.floor_s:.4f}",
            f"{gap_s / self.floor_s:.0f}",
            reporting.spread([stall.publication.total_s for stall in self.stalls], 3),
        ]

    def miss(self) -> str:
        """How the goal was missed; empty if it was met."""
        gap_s = statistics.median(stall.publication.update.gap_s for stall in self.stalls)
        allowed_s = goals.MAX_FIXED_GAP_S + goals.MAX_GAP_OVER_FLOOR * self.floor_s
        return f"{self.name}: {gap_s:.2f} s, allowed {allowed_s:.2f} s" if gap_s > allowed_s else ""


async def measure(config: EngineConfig, *, quick: bool, large: bool = False) -> str:
    """The section, as Markdown."""
    rows: list[Row] = []
    for size in QUICK_SIZES if quick else LARGE_SIZES if large else SIZES:
        rows += await _rows(config, size, repeats=2 if quick or size not in QUICK_SIZES else 4)
    columns = ["model, mode, KV", "MB", "idle, s", f"{NUM_RUNNING} running, s", "longest silence, s", "one step, s"]
    columns += ["MB/s while running", "floor, s", "gap / floor", "published in, s"]
    intro = (
        "\n## Weight-update gap\n\nQwen3-shaped float32 weights (random), sent by the learner's own publisher. "
        "Gap: generation paused, as the client reports it (`engine/update_gap_s`), with nothing running and with "
        f"{NUM_RUNNING} requests of {PROMPT_TOKENS} prompt tokens. Longest silence: between two tokens of one running "
        "request around the update; it holds what the gap does not, above all recomputing the KV entries; `one step` "
        "is its usual wait for a token. Floor: one copy of the same bytes in memory. Published: all of it, from the "
        "learner's call to the proof. 4 updates each (2 of the larger models) after one that warms up: median (least "
        "to greatest).\n\n"
    )
    return (
        intro
        + reporting.table(columns, [row.cells() for row in rows])
        + goals.verdict([miss for row in rows if (miss := row.miss())])
    )


async def _rows(config: EngineConfig, size: str, *, repeats: int) -> list[Row]:
    """A server for each backend; they start side by side and are measured one after the other."""
    model = models.make("Qwen3", models.BY_SIZE[size], tied=False)
    rows = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir=_memory()) as temporary:
        folder = Path(temporary)
        path = models.save(model, folder / "model")
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as starting:
            by_backend = {TRANSFER_BACKENDS[mode]: mode for mode in modes(config)}
            started = {
                backend: starting.create_task(stack.enter_async_context(_server(path, config, mode, folder)))
                for backend, mode in by_backend.items()
            }
            servers = {backend: await task for backend, task in started.items()}
            for mode in modes(config):
                settings = config.model_copy(update={"weight_transfer": mode})
                rows += await _mode_rows(
                    model, size, settings, servers[TRANSFER_BACKENDS[mode]], folder / mode, repeats=repeats
                )
    return rows


def _server(path: Path, config: EngineConfig, mode: str, folder: Path) -> Any:
    # A message a token: the silence must be the engine's.
    update = {"weight_transfer": mode, "stream_interval": 1, "kv_cache_bytes": 2**30}
    return serve(
        path, config=config.model_copy(update=update), dtype="float32", max_context=MAX_CONTEXT, log_folder=folder
    )


async def _mode_rows(
    model: Any, size: str, config: EngineConfig, server: Server, folder: Path, *, repeats: int
) -> list[Row]:
    sender = Sender(model, mode=config.weight_transfer, config=config, folder=folder)
    kvs: tuple[KvOnUpdate, ...] = ("stale", "recompute")
    rows = []
    try:
        for kv in kvs:
            async with _client(server, config, kv) as engine:
                idle = [await _next_version(model, sender, engine) for _ in range(repeats + 1)][1:]
                stalls, step_s = await _under_load(model, sender, engine, server, repeats=repeats)
            floor_s = copy_s(idle[0].update.num_bytes)
            name = f"{size}, {config.weight_transfer}, {kv}"
            rows.append(Row(name=name, idle=idle, stalls=stalls, step_s=step_s, floor_s=floor_s))
    finally:
        await sender.close()
    return rows


def _client(server: Server, config: EngineConfig, kv: KvOnUpdate) -> VLLMEngine:
    return VLLMEngine(
        server.url,
        model=SERVED_NAME,
        request_timeout_s=DEADLINE_S,
        updates=UpdateSettings(
            update_timeout_s=DEADLINE_S, kv_on_update=kv, by_folder=config.weight_transfer == "reload"
        ),
    )


async def _next_version(model: Any, sender: Sender, engine: VLLMEngine) -> Publication:
    probe = await asyncio.to_thread(_changed, model)
    return await sender.publish(engine, await engine.version() + 1, probe)


def _changed(model: Any) -> Probe:
    """Other weights, and their logprobs."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(STEP_OF_WEIGHTS)
    return models.probe(model)


async def _under_load(
    model: Any, sender: Sender, engine: VLLMEngine, server: Server, *, repeats: int
) -> tuple[list[Stall], float]:
    """The updates, and how long a token usually takes."""
    draw = random.Random(repeats)
    arrivals = Arrivals()
    async with _running(engine, server, draw, arrivals):
        stalls = []
        for _ in range(repeats):
            await arrivals.more(5)
            step_s = arrivals.usual_s()
            mark = arrivals.count()
            publication = await _next_version(model, sender, engine)
            await arrivals.more(2)
            stalls.append(Stall(publication=publication, silence_s=arrivals.longest_since(mark)))
    return stalls, step_s


class Arrivals:
    """When the tokens of one request came."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._came = asyncio.Condition()

    async def add(self) -> None:
        """A token came."""
        async with self._came:
            self._at_s.append(time.perf_counter())
            self._came.notify_all()

    def count(self) -> int:
        """Tokens so far."""
        return len(self._at_s)

    async def more(self, number: int) -> None:
        """Wait for that many more."""
        wanted = len(self._at_s) + number
        async with asyncio.timeout(DEADLINE_S), self._came:
            await self._came.wait_for(lambda: len(self._at_s) >= wanted)

    def usual_s(self) -> float:
        """Median wait of the last five."""
        return statistics.median(_waits(self._at_s[-6:]))

    def longest_since(self, count: int) -> float:
        """Longest wait after the first `count` tokens."""
        return max(_waits(self._at_s[count - 1 :]))


def _waits(at_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(at_s)]


@asynccontextmanager
async def _running(engine: VLLMEngine, server: Server, draw: random.Random, arrivals: Arrivals) -> AsyncIterator[None]:
    """Requests that run through the whole block; the tokens of one of them are noted in `arrivals`."""
    prompts = [[draw.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_RUNNING)]
    sampling = Sampling(max_tokens=MAX_CONTEXT - PROMPT_TOKENS)
    name = f"gap-{time.monotonic_ns()}"
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(engine.generate(prompt, sampling, request_id=f"{name}-{i}"))
        for i, prompt in enumerate(prompts[1:])
    ]
    tasks.append(asyncio.create_task(_watched(engine, prompts[0], sampling, name, arrivals)))
    async with outlasting(tasks):
        async with asyncio.timeout(DEADLINE_S):
            while await server.counter("vllm:num_requests_running") < NUM_RUNNING:
                await asyncio.sleep(RUNNING_POLL_S)
        yield


async def _watched(
    engine: VLLMEngine, prompt: Sequence[int], sampling: Sampling, request_id: str, arrivals: Arrivals
) -> None:
    body = {
        "request_id": request_id,
        "model": SERVED_NAME,
        "token_ids": prompt,
        "sampling_params": sampling_body(sampling) | {"logprobs": 0},
        "stream": True,
    }
    http = VLLMHttpClient(engine.url, timeout_s=DEADLINE_S)
    try:
        async for _ in http.stream("/inference/v1/generate", body):
            await arrivals.add()
    finally:
        await http.close()


def copy_s(num_bytes: int, *, repeats: int = 5) -> float:
    """Median seconds to copy as many bytes from memory to memory, once the pages are there."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    times_s = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
