"""What `place=ray` costs beside the parts themselves: `python -m benchmarks.ray_costs`, in an environment with Ray.

Memory of Ray's processes on a head, on a further node and for each part; seconds until a part writes its first line;
calls to one part's actor, alone and with 200 at once. Several raylets run on this machine, on loopback.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from agentrl.config.ray import RayConfig
from agentrl.supervision.place import LocalPlace, Needs, Place
from benchmarks import reporting

REPORT = reporting.ROOT / "benchmarks" / "ray_costs.md"
NUM_STARTS = 5
NUM_PARTS = 8
NUM_CALLS = 200
COMMAND = [sys.executable, "-I", "-S", "-c", "import time; print('on', flush=True); time.sleep(600)"]
OWN = """
import asyncio, time
from agentrl.config.ray import RayConfig
from agentrl.supervision.ray_place import ray_place

async def main():
    began = time.monotonic()
    async with ray_place(RayConfig()):
        print(time.monotonic() - began)

asyncio.run(main())
"""
"""In a process of its own: one process makes one cluster."""
NEEDS = Needs(bundle={"CPU": 1.0})
START_S = 60.0
MIB = 2**20
PREDICTED = """
Predicted before the measurement: 400 MB on a head, 150 MB on a further node, 80 MB for each part, 100 MB in the
command itself; 2 seconds more for a start than without Ray, of which most is a new process of Ray; 5 seconds to make a
cluster of one's own. A call takes 2 ms, and 200 at once take 200 ms.
"""


def main() -> None:
    """Measure, and write the report."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text("0123456789abcdef" * 2)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        head = reporting.header("What Ray costs", {"parts": NUM_PARTS, "starts": NUM_STARTS})
        text = asyncio.run(_measured(Path(folder)))
    REPORT.write_text(f"{head}{PREDICTED}\n{text}")  # what became of the predictions is added by hand
    sys.stdout.write(text)


async def _measured(folder: Path) -> str:
    before = _mib([os.getpid()])
    local = [await _start_s(LocalPlace(), folder / f"local-{index}") for index in range(NUM_STARTS)]
    own = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", OWN], capture_output=True, check=True)
    import ray
    from ray.cluster_utils import Cluster

    from agentrl.supervision.ray_place import ray_place

    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * MIB, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**node, "num_cpus": 0}
    )  # it takes the main thread's signals
    try:
        other = cluster.add_node(num_cpus=NUM_PARTS, **node)
        began = time.monotonic()
        async with ray_place(RayConfig(address=cluster.address)) as place:
            join_s = time.monotonic() - began
            driver = _mib([os.getpid()]) - before
            starts = [await _start_s(place, folder / f"ray-{index}") for index in range(NUM_STARTS)]
            nodes = [_mib(_pids(found)) for found in (cluster.head_node, other)]
            parts, together_s = await _parts(place, folder)
            alone, at_once = await _calls(ray)
    finally:
        await asyncio.to_thread(cluster.shutdown)
    memory = [
        ("a head (`ray start --head`, without a dashboard)", f"{nodes[0]:.0f}"),
        ("a further node", f"{nodes[1]:.0f}"),
        ("each part: the actor that watches it", f"{parts:.0f}"),
        ("the command `agentrl train`: Ray's library", f"{driver:.0f}"),
    ]
    times = [
        ("a cluster of one's own, made and left to its first use", f"{float(own.stdout):.1f}"),
        ("joining a cluster, with the check of its token", f"{join_s:.1f}"),
        ("a part's first line, without Ray", reporting.spread(local, 2)),
        ("a part's first line, by Ray", reporting.spread(starts, 2)),
        (f"the first lines of {NUM_PARTS} parts started together", f"{together_s:.1f}"),
    ]
    calls = [
        ("one call to an actor", f"{1000 * alone:.1f}"),
        (f"{NUM_CALLS} at once, the last", f"{1000 * at_once:.0f}"),
    ]
    return "\n".join(
        [
            "## Memory\n\nProportional set size, MiB.\n",
            reporting.table(("of", "MiB"), memory),
            "## Seconds\n\nMedian (least to greatest) where there are several.\n",
            reporting.table(("until", "s"), times),
            "## Calls\n\nThe round trip of a question for news, while the part writes nothing.\n",
            reporting.table(("", "ms"), calls),
        ]
    )


async def _start_s(place: Place, folder: Path) -> float:
    """Seconds from asking for a part to its first line in the log here."""
    log = folder.with_suffix(".log")
    began = time.monotonic()
    async with place.child("part", COMMAND, log_path=log, needs=NEEDS):
        await _line(log)
        return time.monotonic() - began


async def _line(log: Path) -> None:
    async with asyncio.timeout(START_S):
        while not _has_line(log):
            await asyncio.sleep(0.01)


def _has_line(log: Path) -> bool:
    return log.exists() and log.stat().st_size > 0


async def _parts(place: Place, folder: Path) -> tuple[float, float]:
    """(MiB of one part's actor, seconds until the last of all has written its line)."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:

        async def start(index: int) -> None:
            log = folder / f"together-{index}.log"
            await stack.enter_async_context(place.child("part", COMMAND, log_path=log, needs=NEEDS))
            await _line(log)

        await asyncio.gather(*(start(index) for index in range(NUM_PARTS)))
        together_s = time.monotonic() - began
        actors = [process.pid for process in psutil.process_iter() if _name(process).startswith("ray::PartHost")]
        assert len(actors) >= NUM_PARTS
        return statistics.fmean(_mib([pid]) for pid in actors), together_s


async def _calls(ray: Any) -> tuple[float, float]:
    """Seconds of (a call alone, the last of many at once) to one actor."""
    from agentrl.supervision.part_host import PartHost

    host = ray.remote(PartHost).options(num_cpus=1, max_concurrency=4).remote()
    options = {"python": sys.executable, "cwd": "/", "has_own_temporary": False}
    await host.start.remote(["sleep", "600"], {}, **options)
    alone = []
    for _ in range(20):
        began = time.monotonic()
        await host.news.remote(0, 0, within_s=0.0)
        alone.append(time.monotonic() - began)
    began = time.monotonic()
    await asyncio.gather(*(host.news.remote(0, 0, within_s=0.0) for _ in range(NUM_CALLS)))
    at_once = time.monotonic() - began
    ray.kill(host)
    return statistics.median(alone), at_once


def _pids(node: Any) -> list[int]:
    """The processes of a node of the cluster, idle workers included."""
    started = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [pid for one in started for pid in (one, *(child.pid for child in psutil.Process(one).children(True)))]


def _mib(pids: Iterable[int]) -> float:
    return sum(psutil.Process(pid).memory_full_info().pss for pid in set(pids)) / MIB


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    main()
