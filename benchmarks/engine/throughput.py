"""What our client costs: tokens per second, CPU and latency against bare sockets on the same server."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config import EngineConfig
from benchmarks import reporting
from benchmarks.engine import goals
from benchmarks.engine.server import Server, serve
from trainer.gpu_report import load
from trainer.gpu_report import random_models as models
from trainer.gpu_report.load import Load, Paired, Script
from trainer.gpu_report.serving import SERVED_NAME

T = TypeVar("T")

NUM_ROUNDS = {1: 12, 16: 14, 64: 8, 256: 3}  # by sessions at once
FIRST_TOKENS, OBSERVATION_TOKENS, MAX_TOKENS, NUM_TURNS = 160, 32, 32, 3
OURS, BARE, WHOLE = "our client", "bare sockets", "bare, not streamed"
MAX_CONTEXT = 4096


class Generator:
    """A process of its own that makes the load, so that its CPU time is its own."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in that process."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *arguments))

    def close(self) -> None:
        """End it."""
        self._pool.shutdown()


async def measure(config: EngineConfig, *, quick: bool) -> str:
    """The section, as Markdown."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = models.make("Qwen3", models.QUICKSTART, tied=True)
        path = models.save(model, folder / "model")
        settings = config.model_copy(update={"max_num_seqs": 256, "kv_cache_bytes": 2**30})
        async with serve(path, config=settings, dtype="float32", max_context=MAX_CONTEXT, log_folder=folder) as server:
            generator = Generator()
            try:
                num_rounds = {16: 2, 64: 1} if quick else NUM_ROUNDS
                rates, slow = await _rates(server, generator, num_rounds)
                latencies, late = await _added_latency(server, generator, quick=quick)
                return rates + latencies + goals.verdict([*slow, *late])
            finally:
                generator.close()


async def _rates(server: Server, generator: Generator, num_rounds: Mapping[int, int]) -> tuple[str, list[str]]:
    sessions = load.scripts(
        max(num_rounds),
        num_turns=NUM_TURNS,
        first_tokens=FIRST_TOKENS,
        observation_tokens=OBSERVATION_TOKENS,
        max_tokens=MAX_TOKENS,
        vocab_size=models.QUICKSTART.vocab_size,
    )
    requests = await generator.run(load.record, server.url, SERVED_NAME, sessions)  # warms up, too
    whole = {name: load.not_streamed(request) for name, request in requests.items()}
    ways: dict[str, Callable[[Sequence[Script]], Any]] = {
        OURS: lambda some: generator.run(load.through_our_client, server.url, SERVED_NAME, some),
        BARE: lambda some: generator.run(load.through_sockets, server.url, requests, some),
        WHOLE: lambda some: generator.run(load.through_sockets, server.url, whole, some),
    }
    rows: list[list[object]] = []
    misses = []
    for concurrency, rounds in num_rounds.items():
        share, cells = await _compare(server, ways, sessions[:concurrency], num_rounds=rounds)
        rows.append([concurrency, rounds, *cells])
        if share < goals.MIN_SHARE_OF_BARE:
            misses.append(f"{share:.1%} of the bare generator's tokens/s at {concurrency} sessions")
    columns = ["sessions at once", "rounds", *(f"{way}, tokens/s" for way in ways)]
    columns += ["ours / bare", "ours / not streamed"]
    columns += [f"{way}, CPU ms a call" for way in ways]
    columns += [f"{OURS}, share of a core", "server, cores"]
    intro = (
        "\n## Throughput\n\nModel of configs/quickstart.yaml's shape (random). A session has "
        f"{NUM_TURNS} turns: first prompt {FIRST_TOKENS} tokens, then {MAX_TOKENS} generated and {OBSERVATION_TOKENS} "
        "observed a turn. Rounds in turns after one that warms up: median (least to greatest). The prefix cache is "
        "emptied before each. The load comes from a process of its own on the same machine. All sessions start at once "
        "and their turns are equally long, so they stay in step: what a client does for one request delays all that "
        "stand behind it. Real sessions spread out.\n\n"
    )
    return intro + reporting.table(columns, rows), misses


async def _compare(
    server: Server, ways: Any, sessions: Sequence[Script], *, num_rounds: int
) -> tuple[float, list[str]]:
    """Median share of the bare generator's rate, and the cells of a row."""
    loads: dict[str, dict[int, Load]] = defaultdict(dict)  # by round
    server_cores: list[float] = []
    for number in range(num_rounds):
        order = list(ways.items())
        for way, run in order[number % len(order) :] + order[: number % len(order)]:
            if way == WHOLE and number % 2:  # half as often: it is no goal
                continue
            await server.forget_prefixes()
            cpu_began = server.cpu_s()
            loads[way][number] = made = await run(sessions)
            server_cores.append((server.cpu_s() - cpu_began) / made.wall_s)
    shares = {
        way: [loads[OURS][number].tokens_per_s / one.tokens_per_s for number, one in loads[way].items()]
        for way in (BARE, WHOLE)
    }
    cells = [reporting.spread([one.tokens_per_s for one in loads[way].values()], 0) for way in ways]
    cells += [reporting.spread(shares[way], 3) for way in (BARE, WHOLE)]
    cells += [f"{statistics.median(one.cpu_ms_a_call for one in loads[way].values()):.2f}" for way in ways]
    share_of_core = statistics.median(one.cpu_s / one.wall_s for one in loads[OURS].values())
    cells += [f"{share_of_core:.1%}", f"{statistics.median(server_cores):.2f}"]
    return statistics.median(shares[BARE]), cells


async def _added_latency(server: Server, generator: Generator, *, quick: bool) -> tuple[str, list[str]]:
    rows, misses = [], []
    for max_tokens, num_calls in ((1, 100 if quick else 300), (MAX_TOKENS, 10 if quick else 60)):
        sessions = load.scripts(
            num_calls,
            num_turns=1,
            first_tokens=FIRST_TOKENS,
            observation_tokens=0,
            max_tokens=max_tokens,
            vocab_size=models.QUICKSTART.vocab_size,
        )
        requests = await generator.run(load.record, server.url, SERVED_NAME, sessions)
        paired = await generator.run(load.in_turns, server.url, SERVED_NAME, requests, sessions)
        least_ms, cells = _latencies(paired)
        rows.append([max_tokens, num_calls, *cells])
        if least_ms >= goals.MAX_ADDED_MS:
            misses.append(f"at least {least_ms:.2f} ms added to a call of {max_tokens} tokens")
    columns = [
        "tokens a call",
        "calls each way",
        "ours p50, ms",
        "bare p50, ms",
        "added p50, ms",
        "ours p99",
        "bare p99",
    ]
    text = (
        "\nLatency, one call at a time, ours and bare in turns. Added: the median of the differences, and where it "
        "lies with 95 % confidence.\n\n"
    )
    return text + reporting.table(columns, rows), misses


def _latencies(paired: Paired) -> tuple[float, list[str]]:
    """The least that may have been added, and the cells of a row."""
    ours_ms, bare_ms = ([1e3 * value for value in values] for values in (paired.ours_s, paired.bare_s))
    low, middle, high = median_interval([a - b for a, b in zip(ours_ms, bare_ms, strict=True)])
    tails = [f"{reporting.percentile(values, 0.99):.2f}" for values in (ours_ms, bare_ms)]
    medians = [f"{statistics.median(values):.2f}" for values in (ours_ms, bare_ms)]
    return low, [*medians, f"{middle:.2f} ({low:.2f} to {high:.2f})", *tails]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the order statistics that hold the true one with 95 % confidence (normal approximation)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(ordered) - 1)]
