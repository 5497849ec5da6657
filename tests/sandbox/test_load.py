"""Many sessions at once, some hostile: no call is lost or runs twice, and clients survive a kill of the service."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator

import pytest

from sandbox.client import SandboxClient, SandboxUnavailable, SessionLost
from sandbox.protocol import ExecResult
from tests.sandbox.conftest import (
    TOKEN,
    Service,
    control_groups,
    descendants,
    is_running,
    stop_service,
    wait_until,
)
from tests.sandbox.tiers import TIERS, Tier, why_not

NUM_SLOTS = 8
HOSTILE = (
    "while True: pass",
    "import os; os._exit(1)",
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "x = []\nwhile True: x.append(b'x' * 10**7)",
    "while True: print('x' * 1000)",
    "import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(100)",
    "import ctypes; ctypes.string_at(0)",
    "import os\nos.closerange(0, 100)",
)


@pytest.fixture(params=["namespaces", pytest.param("landlock", marks=pytest.mark.slow)])
def tier(request: pytest.FixtureRequest) -> Tier:
    tier = TIERS[request.param]
    if reason := why_not(tier):
        pytest.skip(reason)
    return tier


@pytest.fixture
def service(tier: Tier) -> Iterator[Service]:
    service = tier.start(slots=NUM_SLOTS)
    yield service
    if service.process.poll() is None:
        stop_service(service)


async def episode(client: SandboxClient, number: int) -> list[ExecResult]:
    """Two calls of one session; every tenth session is hostile in between."""
    async with client.session() as session:
        results = [await session.exec(f"import time; time.sleep(0.1); print({number})", timeout_s=10)]
        if number % 10 == 0:
            results.append(await session.exec(HOSTILE[number // 10 % len(HOSTILE)], timeout_s=0.3))
        results.append(await session.exec(f"import time; time.sleep(0.1); print({number})", timeout_s=10))
    return results


async def num_executions(client: SandboxClient) -> int:
    text = (await client.call("GET", "/metrics")).decode()
    return sum(int(float(count)) for count in re.findall(r"^sandbox_executions_total\{.*\} (\S+)$", text, re.MULTILINE))


async def test_a_thousand_executions_on_eight_slots(tier: Tier, service: Service) -> None:
    num_episodes = 500
    async with SandboxClient(service.url, TOKEN) as client:
        async with asyncio.timeout(150):
            while (await client.health()).warm < NUM_SLOTS:
                await asyncio.sleep(0.05)
            idle = len(descendants(service.process.pid))
            episodes = await asyncio.gather(*(episode(client, number) for number in range(num_episodes)))
        assert await num_executions(client) == sum(map(len, episodes)) == 1000 + num_episodes // 10
        assert (await client.health()).sessions == 0
    for number, results in enumerate(episodes):
        for result in (results[0], results[-1]):
            assert (result.status, result.stdout) == ("ok", f"{number}\n")
            assert result.wall_s < 8
    assert max(result.queue_s for results in episodes for result in results) > 0.05
    assert wait_until(lambda: len(descendants(service.process.pid)) <= idle, 10)


async def test_a_service_killed_under_load_is_survived(tier: Tier, service: Service) -> None:
    async def until_served(number: int) -> int:
        """Number of failed attempts before an episode succeeds."""
        for failures in range(100):
            try:
                assert (await episode(client, number))[-1].stdout == f"{number}\n"
                if replaced.is_set():
                    return failures
            except SessionLost:
                lost.add(number)
            except SandboxUnavailable:
                await asyncio.sleep(0.2)
        raise AssertionError("never served again")

    replaced, lost = asyncio.Event(), set[int]()
    async with SandboxClient(service.url, TOKEN) as client, asyncio.timeout(90):
        tasks = [asyncio.create_task(until_served(number)) for number in range(40)]
        await asyncio.sleep(1.5)
        below = descendants(service.process.pid)
        stop_service(service, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_running, below)))
        assert wait_until(lambda: control_groups(service.process.pid) == [])
        second = tier.start("--port", service.url.rsplit(":", 1)[1], slots=NUM_SLOTS)
        try:
            replaced.set()
            failures = await asyncio.gather(*tasks)
        finally:
            stop_service(second)
    assert sum(failures) > 0 or lost
