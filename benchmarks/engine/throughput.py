"""What our client costs: tokens per second, CPU and latency against bare sockets on the same server."""

from __future__ import annotations

import asyncio
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
from benchmarks.engine import goals, load, models
from benchmarks.engine.load import Load, Paired, Script
from benchmarks.engine.server import SERVED_NAME, Server, serve

T = TypeVar("T")

NUM_ROUNDS = {1: 8, 16: 8, 64: 5, 256: 3}  # by sessions at once
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
        "emptied before each. The load comes from a process of its own on the same machine.\n\n"
    )
    return intro + reporting.table(columns, rows), misses


async def _compare(
    server: Server, ways: Any, sessions: Sequence[Script], *, num_rounds: int
) -> tuple[float, list[str]]:
    """Median share of the bare generator's rate, and the cells of a row."""
    loads: dict[str, list[Load]] = defaultdict(list)
    server_cores: list[float] = []
    for number in range(num_rounds):
        order = list(ways.items())
        for way, run in order[number % len(order) :] + order[: number % len(order)]:
            await server.forget_prefixes()
            cpu_began = server.cpu_s()
            loads[way].append(made := await run(sessions))
            server_cores.append((server.cpu_s() - cpu_began) / made.wall_s)
    rates = {way: [one.tokens_per_s for one in found] for way, found in loads.items()}
    shares = {way: [a / b for a, b in zip(rates[OURS], rates[way], strict=True)] for way in (BARE, WHOLE)}
    cpu = [f"{statistics.median(one.cpu_ms_a_call for one in found):.2f}" for found in (loads[way] for way in ways)]
    share_of_core = statistics.median(one.cpu_s / one.wall_s for one in loads[OURS])
    cells = [reporting.spread(rates[way], 0) for way in ways]
    cells += [reporting.spread(shares[way], 3) for way in (BARE, WHOLE)]
    cells += [*cpu, f"{share_of_core:.1%}", f"{statistics.median(server_cores):.2f}"]
    return statistics.median(shares[BARE]), cells


async def _added_latency(server: Server, generator: Generator, *, quick: bool) -> tuple[str, list[str]]:
    rows, misses = [], []
    for max_tokens, num_calls in ((1, 100 if quick else 300), (MAX_TOKENS, 10 if quick else 40)):
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
        added_ms, cells = _latencies(paired)
        rows.append([max_tokens, num_calls, *cells])
        if added_ms >= goals.MAX_ADDED_MS:
            misses.append(f"{added_ms:.2f} ms added to a call of {max_tokens} tokens")
    columns = [
        "tokens a call",
        "calls each way",
        "ours p50, ms",
        "bare p50, ms",
        "added p50, ms",
        "ours p99",
        "bare p99",
    ]
    text = "\nLatency, one call at a time, ours and bare in turns. Added: the median of the differences.\n\n"
    return text + reporting.table(columns, rows), misses


def _latencies(paired: Paired) -> tuple[float, list[str]]:
    ours_ms, bare_ms = ([1e3 * value for value in values] for values in (paired.ours_s, paired.bare_s))
    added_ms = statistics.median(a - b for a, b in zip(ours_ms, bare_ms, strict=True))
    tails = [reporting.percentile(values, 0.99) for values in (ours_ms, bare_ms)]
    numbers = (statistics.median(ours_ms), statistics.median(bare_ms), added_ms, *tails)
    return added_ms, [f"{value:.2f}" for value in numbers]
