"""How long a program waits for its sandbox: ours and its common alternatives, alternating within one run.

`python -m benchmarks.sandbox` prints a table and writes benchmarks/sandbox.md. Every contender must print the right
answer in each call. Where bubblewrap or a Docker engine is missing the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from benchmarks import reporting
from sandbox.backends import processes
from sandbox.backends.base import BackendError, BackendSettings
from sandbox.backends.probe import start_backend
from sandbox.client import SandboxClient, SandboxUnavailable
from sandbox.supervisor import Interpreter

ANSWER = "42"
SMALL = "print(6 * 7)"
NUMPY = "import numpy\nprint(6 * 7)"
LIBRARIES = "import numpy, sympy\nprint(6 * 7)"
IMAGE = "agentrl-sandbox"
CONCURRENCY = 8 * len(os.sched_getaffinity(0))
CALL_DEADLINE_S = 60.0
PAUSE_S = 0.5
SETTLE_DEADLINE_S = 120.0
NUM_IDLE_SESSIONS = 32
REPORT = Path(__file__).with_suffix(".md")
BASELINE = "subprocess + temp file, numpy"


class Stopwatch:
    """Runs from the start of a call; a call may restart it after its preparations and stop it before it cleans up."""

    def __init__(self) -> None:
        self._began, self._stopped_s = time.perf_counter(), -1.0

    def restart(self) -> None:
        """Restart the clock: earlier time does not count."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Stop the clock: later time does not count."""
        if self._stopped_s < 0:
            self._stopped_s = time.perf_counter() - self._began
        return self._stopped_s


Call = Callable[[Stopwatch], Awaitable[str]]


@dataclass(kw_only=True)
class Contender:
    """One way to run a program: `call` runs it once and returns what it printed."""

    name: str
    call: Call
    num_calls: int  # a round
    concurrency: int = 0  # 0: its throughput is not measured
    client: SandboxClient | None = None  # of the service, which gets time to become ready again
    latencies_s: list[list[float]] = field(default_factory=list)  # one list a round
    rates_per_s: list[float] = field(default_factory=list)  # one a round

    async def once(self) -> float:
        """Seconds of one call. Raises RuntimeError for a wrong answer."""
        watch = Stopwatch()
        output = await self.call(watch)
        elapsed_s = watch.stop()
        if ANSWER not in output:
            raise RuntimeError(f"{self.name}: wrong answer {output[-300:]!r}")
        return elapsed_s

    async def round(self) -> None:
        """Latencies of calls one after the other, then the rate of many at once."""
        self.latencies_s.append([await self.once() for _ in range(self.num_calls)])
        if not self.concurrency:
            return
        total = max(self.num_calls, 3 * self.concurrency)
        slots = asyncio.Semaphore(self.concurrency)

        async def limited() -> None:
            async with slots:
                await self.once()

        began = time.perf_counter()
        await asyncio.gather(*(limited() for _ in range(total)))
        self.rates_per_s.append(total / (time.perf_counter() - began))


# -- ours -----------------------------------------------------------------------------------------------------------


async def through_the_service(client: SandboxClient, tier: str, num_calls: int) -> list[Contender]:
    """A live session, the lease of one, a fresh one, the next call after a crash, and stateless calls."""
    free = [await client.open_session() for _ in range(CONCURRENCY)]

    async def live(_watch: Stopwatch) -> str:
        session = free.pop()
        try:
            return (await session.exec(SMALL)).stdout
        finally:
            free.append(session)

    async def lease(watch: Stopwatch) -> str:
        async with client.session() as session:
            watch.stop()
            return (await session.exec(SMALL)).stdout

    async def fresh(watch: Stopwatch) -> str:
        async with client.session() as session:
            result = await session.exec(LIBRARIES)
            watch.stop()
            return result.stdout

    async def recycle(watch: Stopwatch) -> str:
        await free[0].exec("import os; os._exit(1)")
        watch.restart()
        return (await free[0].exec(SMALL)).stdout

    async def stateless(_watch: Stopwatch) -> str:
        body = json.dumps({"code": LIBRARIES}).encode()
        return str(json.loads(await client.call("POST", "/run_code", content=body))["run_result"]["stdout"])

    few = max(num_calls // 4, 3)
    return [
        Contender(name=f"{tier}: live session", call=live, num_calls=num_calls, client=client, concurrency=CONCURRENCY),
        Contender(name=f"{tier}: lease", call=lease, num_calls=few, client=client),
        Contender(name=f"{tier}: lease and first call", call=fresh, num_calls=few, client=client),
        Contender(name=f"{tier}: next call after a crash", call=recycle, num_calls=few, client=client),
        Contender(
            name=f"{tier}: stateless /run_code", call=stateless, num_calls=few, client=client, concurrency=CONCURRENCY
        ),
    ]


@contextlib.asynccontextmanager
async def without_http(tier: str, num_calls: int) -> AsyncIterator[Contender]:
    """The same interpreter, called in this process. The difference to a live session is the cost of HTTP."""
    backend = await start_backend(tier, BackendSettings())
    interpreter = await Interpreter.start(backend)

    async def call(_watch: Stopwatch) -> str:
        result = await interpreter.execute(SMALL, timeout_s=10, max_output_bytes=1000, stdin=None, seed=None)
        return result.stdout

    try:
        yield Contender(name=f"{tier}: live session without HTTP", call=call, num_calls=num_calls)
    finally:
        await interpreter.close()
        await backend.stop()


async def idle_pss_mib(client: SandboxClient) -> float:
    """Memory of one more idle session that has run something: proportional share, all processes."""
    before = _pss_bytes(os.getpid())
    sessions = [await client.open_session() for _ in range(NUM_IDLE_SESSIONS)]
    for session in sessions:
        await session.exec(LIBRARIES)
    after = _pss_bytes(os.getpid())
    for session in sessions:
        await session.close()
    return (after - before) / NUM_IDLE_SESSIONS / 2**20


def _pss_bytes(root: int) -> int:
    total = 0
    for pid in processes.descendants(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) * 1024 if line.startswith("Pss:") else 0
    return total


# -- the others -----------------------------------------------------------------------------------------------------


def per_call_process(name: str, command: Sequence[str], code: str, num_calls: int) -> Contender:
    """A new Python for each program, which it reads from a temporary file, as most reward servers do."""

    async def call(_watch: Stopwatch) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(code)
            file.flush()
            return await _output([*command, sys.executable, file.name])

    return Contender(name=name, call=call, num_calls=num_calls, concurrency=CONCURRENCY)


def bubblewrap(code: str, num_calls: int) -> Contender:
    """The same, with the file system read-only and no namespace shared."""
    flags = "--ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent --new-session"
    return per_call_process("bubblewrap + temp file, numpy and sympy", ["bwrap", *flags.split()], code, num_calls)


@contextlib.asynccontextmanager
async def docker_exec(num_calls: int) -> AsyncIterator[Contender]:
    """A new Python for each program in one container that is running already. Raises RuntimeError where none can."""
    run = ["docker", "run", "--detach", "--rm", "--network", "none", "--entrypoint", "sleep", IMAGE, "100000"]
    container = (await _output(run)).strip()

    async def call(_watch: Stopwatch) -> str:
        return await _output(["docker", "exec", container, "python", "-c", LIBRARIES])

    try:
        yield Contender(name="docker exec, numpy and sympy", call=call, num_calls=num_calls, concurrency=CONCURRENCY)
    finally:
        await _output(["docker", "rm", "--force", container])


async def _output(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            out, error = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {error.decode(errors='replace')[-300:]}")
    return out.decode()


# -- the run --------------------------------------------------------------------------------------------------------


async def measure(num_rounds: int, num_calls: int, tiers: Sequence[str]) -> str:
    """The report, as Markdown."""
    settings = (
        f"{num_rounds} rounds in turns after one to warm up, {num_calls} calls a round (fewer where they are slow), "
        f"{CONCURRENCY} at a time for the rates, 8 slots"
    )
    text = reporting.header("Sandbox: what a program waits for", {"settings": settings})
    missing: list[str] = []
    contenders: list[Contender] = []
    idle_mib: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        few = max(num_calls // 20, 3)
        for tier in tiers:
            try:
                client = await stack.enter_async_context(SandboxClient.embedded(backend=tier))
                calls = num_calls if tier != "docker" else num_calls // 4
                if tier != "docker":  # its processes cannot be inspected from here
                    idle_mib[tier] = await idle_pss_mib(client)
                contenders += await through_the_service(client, tier, calls)
                contenders.append(await stack.enter_async_context(without_http(tier, calls)))
            except (SandboxUnavailable, BackendError) as error:
                missing.append(f"{tier}: {error}")
        contenders += [
            per_call_process("subprocess + temp file, nothing imported", [], SMALL, few),
            per_call_process(BASELINE, [], NUMPY, few),
            per_call_process("subprocess + temp file, numpy and sympy", [], LIBRARIES, few),
        ]
        if shutil.which("bwrap"):
            contenders.append(bubblewrap(LIBRARIES, few))
        else:
            missing.append("bubblewrap: not installed")
        try:
            contenders.append(await stack.enter_async_context(docker_exec(few)))
        except (OSError, RuntimeError) as error:
            missing.append(f"docker exec: {error}")
        await _rounds(contenders, num_rounds)
    return text + _report(contenders, idle_mib, missing)


async def _rounds(contenders: Sequence[Contender], num_rounds: int) -> None:
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=(num_rounds + 1) * len(contenders))
        for number in range(num_rounds + 1):
            for contender in contenders:
                progress.update(bar, description=f"round {number} of {num_rounds}: {contender.name}")
                await contender.round()
                await _settle(contender.client)
                progress.advance(bar)
                if number == 0:  # the first only warms up
                    contender.latencies_s.clear()
                    contender.rates_per_s.clear()


async def _settle(client: SandboxClient | None) -> None:
    """Wait until background work of one contender, such as starting interpreters, does not load the next one."""
    await asyncio.sleep(PAUSE_S)
    if client is not None:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while (health := await client.health()).warm < health.slots:
                await asyncio.sleep(0.1)
        await asyncio.sleep(PAUSE_S)


def _report(contenders: Sequence[Contender], idle_mib: dict[str, float], missing: Sequence[str]) -> str:
    base = next(one for one in contenders if one.name == BASELINE)
    rows = []
    for one in contenders:
        latencies_ms = [1e3 * value for latencies in one.latencies_s for value in latencies]
        medians_ms = [1e3 * statistics.median(latencies) for latencies in one.latencies_s]
        ratios = [
            statistics.median(theirs) / statistics.median(own)
            for theirs, own in zip(base.latencies_s, one.latencies_s, strict=True)
        ]
        rates = reporting.spread(one.rates_per_s, 0) if one.rates_per_s else ""
        gains = [own / theirs for own, theirs in zip(one.rates_per_s, base.rates_per_s, strict=False)]
        rows.append(
            [
                one.name,
                f"{statistics.median(latencies_ms):.2f}",
                f"{reporting.percentile(latencies_ms, 0.99):.2f}",
                f"{min(medians_ms):.2f} to {max(medians_ms):.2f}",
                reporting.spread(ratios),
                rates,
                reporting.spread(gains) if gains else "",
            ]
        )
    columns = ["", "p50, ms", "p99, ms", "median of a round, ms", "times faster *", "calls a second", "times more *"]
    text = "\n" + reporting.table(columns, rows)
    text += f"\n\\* than *{BASELINE}* in the same round: median (least to greatest).\n"
    text += "".join(f"\nAn idle session of `{tier}` takes {mib:.1f} MiB (PSS).\n" for tier, mib in idle_mib.items())
    return text + "".join(f"\nNot measured: {reason}\n" for reason in missing)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="calls a round of the fastest contender")
    parser.add_argument("--tiers", nargs="+", default=["namespaces", "landlock", "docker"])
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    report = asyncio.run(measure(options.rounds, options.calls, options.tiers))
    options.out.write_text(report)
    print(report)


if __name__ == "__main__":
    main()
