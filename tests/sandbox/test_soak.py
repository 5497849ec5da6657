"""Ten minutes of everything at once; afterwards the service holds no more than it did after the first minute.

`pytest -m soak -s` runs it and prints what it saw; AGENTRL_SOAK_S makes it shorter or longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from sandbox.client import SandboxClient
from tests.sandbox.attacks import test_input, test_memory, test_output, test_processes, test_time
from tests.sandbox.conftest import TOKEN, control_groups, descendants, mounts, stop_service, wait_until
from tests.sandbox.tiers import TIERS, why_not

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

DURATION_S = float(os.environ.get("AGENTRL_SOAK_S", "600"))
SAMPLE_INTERVAL_S = 20.0
NUM_CLIENTS = 12
PROGRAMS = [
    *test_time.TIME.values(),
    *test_time.LEFT_RUNNING.values(),
    *test_memory.MEMORY.values(),
    *(test_memory.OPEN.format(folder=".") + fill for fill in test_memory.FILL.values()),
    *test_processes.PROCESSES.values(),
    *(code for code, _ in test_output.OUTPUT.values()),
    *test_output.FORGERIES.values(),
    *(code for code, _ in test_input.INPUTS.values()),
    *test_input.BREAKERS.values(),
]


def sample(pid: int) -> dict[str, int]:
    """The resources that the service and its descendants hold now."""
    memory = Path(f"/proc/{pid}/statm").read_text().split()
    return {
        "processes": len(descendants(pid)),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "rss_mib": int(memory[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "mounts": len(mounts(pid)),
        "control_groups": sum(1 for parent in control_groups(pid) for _ in parent.glob("*/")),
        "folders": len(list(Path("/tmp").glob("sandbox-*"))) + len(os.listdir("/dev/shm")),
    }


@pytest.mark.parametrize("name", ["namespaces", "landlock"])
async def test_nothing_piles_up(name: str) -> None:
    if reason := why_not(TIERS[name]):
        pytest.skip(reason)
    service = TIERS[name].start(slots=8)
    samples, statuses = [], Counter[str]()
    deadline = time.monotonic() + DURATION_S

    async def attack(client: SandboxClient) -> None:
        while time.monotonic() < deadline:
            async with client.session() as session:
                statuses[(await session.exec(random.choice(PROGRAMS), timeout_s=random.uniform(0.1, 1.0))).status] += 1
            async with client.session() as fresh:
                assert (await fresh.exec("6 * 7", timeout_s=10)).result == "42"

    async def watch(client: SandboxClient) -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            began = time.monotonic()
            await client.health()
            assert time.monotonic() - began < 1.0
            samples.append(sample(service.process.pid))

    try:
        async with SandboxClient(service.url, TOKEN) as client, asyncio.TaskGroup() as group:
            group.create_task(watch(client))
            for _ in range(NUM_CLIENTS):
                group.create_task(attack(client))
        idle = 8 + 4  # the warm interpreters and the backend's own
        assert wait_until(lambda: sample(service.process.pid)["processes"] <= idle, 15)
        end = sample(service.process.pid)
        print(f"\n{name}: {DURATION_S:.0f} s, {dict(statuses)}\nfirst {samples[0]}\nlast  {samples[-1]}\nidle  {end}")  # noqa: T201
    finally:
        stop_service(service)
    early = samples[: max(len(samples) // 4, 1)]
    assert end["rss_mib"] <= max(one["rss_mib"] for one in early) + 40
    assert end["descriptors"] <= max(one["descriptors"] for one in early)
    assert end["mounts"] == samples[0]["mounts"]
    assert end["control_groups"] <= max(one["control_groups"] for one in early)
    assert end["folders"] <= max(one["folders"] for one in early)
