"""One sandbox service per tier for all attacks; the host's state is compared before and after."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandbox.client import SandboxClient
from tests.sandbox.conftest import (
    Service,
    control_groups,
    descendants,
    is_running,
    mounts,
    own_tmp,
    stop_service,
    wait_until,
)
from tests.sandbox.tiers import TIERS, Tier, why_not

MAX_GROWTH_BYTES = 150 * 1024**2  # of the service, over a whole suite of hostile output and 10 MB programs
MAX_DESCRIPTORS = 150
OF_OTHERS = ("__KMP_REGISTERED_LIB_", "sem.mp-", "torch_", "psm_", "agentrl-", "buffer-machine-")
"""Prefixes in /dev/shm of OpenMP, multiprocessing, torch, vLLM and other tests that run at the same time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try every tier, or those in the module's TIERS_TO_TRY where the worker stops the attacks in any tier."""
    if "tier" in metafunc.fixturenames:
        names = getattr(metafunc.module, "TIERS_TO_TRY", tuple(TIERS))
        values = [pytest.param(name, marks=_marks(name)) for name in names]
        metafunc.parametrize("tier", values, indirect=True, scope="package")


def _marks(tier: str) -> list[pytest.MarkDecorator]:
    """`make test` attacks one tier, `make test-slow` the others."""
    marks = [] if tier == "namespaces" else [pytest.mark.slow]
    return [*marks, pytest.mark.docker] if tier == "docker" else marks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a part of the cases of the slow tiers, some of every kind; AGENTRL_ALL_ATTACKS=1 keeps all."""
    seen: Counter[tuple[str, str]] = Counter()
    thinned = []
    for item in items:
        tier = getattr(item, "callspec", None) and item.callspec.params.get("tier")  # type: ignore[attr-defined]
        step = TIERS[tier].take_every if tier in TIERS and item.path.parent == Path(__file__).parent else 1
        function = (item.nodeid.partition("[")[0], str(tier))
        if seen[function] % step and not os.environ.get("AGENTRL_ALL_ATTACKS"):
            thinned.append(item)
        seen[function] += 1
    if thinned:
        config.hook.pytest_deselected(items=thinned)
        items[:] = [item for item in items if item not in set(thinned)]


@pytest.fixture(scope="package")
def tier(request: pytest.FixtureRequest) -> Tier:
    """The tier a test runs against."""
    tier = TIERS[request.param]
    if reason := why_not(tier):
        pytest.skip(reason)
    return tier


@pytest.fixture(scope="package")
def service(tier: Tier, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service of the tier. After the last attack, before other tests start, the host must be as it was before."""
    env = request.getfixturevalue("docker_environment") if tier.backend == "docker" else {}
    with own_tmp() as tmp:
        yield from _watched(tier, env, tmp)


def _watched(tier: Tier, env: dict[str, str], tmp: Path) -> Iterator[Service]:
    mounts_before, left_before = mounts(), _leavings(tmp)
    service = tier.start(env={**env, "TMPDIR": str(tmp)})
    pid = service.process.pid
    idle, memory_bytes = len(descendants(pid)), _rss_bytes(pid)
    yield service
    flat = wait_until(lambda: len(descendants(pid)) <= idle + 4, 10)  # the warm ones are full again, or nearly
    running, num_descriptors = descendants(pid), len(os.listdir(f"/proc/{pid}/fd"))
    growth_bytes = _rss_bytes(pid) - memory_bytes
    exit_code = stop_service(service)
    assert flat, f"processes left: {running}"
    assert num_descriptors < MAX_DESCRIPTORS
    assert growth_bytes < MAX_GROWTH_BYTES
    assert exit_code == 0
    assert wait_until(lambda: not any(map(is_running, running))), "orphans after the stop"
    assert control_groups(pid) == []
    assert mounts() == mounts_before
    assert _leavings(tmp) <= left_before


def _leavings(tmp: Path) -> set[str]:
    """Everything on the host that a session could have left there."""
    shared = {str(path) for path in Path("/dev/shm").iterdir() if not _of_others(path)}
    work = {str(path) for path in tmp.iterdir()}
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@sandbox" in line}
    segments = set(Path("/proc/sysvipc/shm").read_text().splitlines())
    return shared | work | sockets | segments


def _of_others(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.name.startswith(OF_OTHERS) and path.lstat().st_uid == os.getuid()
    return True  # it no longer exists


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Healthy = Callable[[], Awaitable[None]]


@pytest.fixture
def healthy(client: SandboxClient, tier: Tier) -> Healthy:
    """A check that the service answers soon, also on a busy machine, and that the next session works."""

    async def check() -> None:
        began = time.monotonic()
        health = await client.health()
        assert health.backend == tier.backend
        assert time.monotonic() - began < 10
        async with client.session() as fresh:
            assert (await fresh.exec("6 * 7", timeout_s=5)).result == "42"

    return check


@pytest.fixture
def isolated(tier: Tier) -> Tier:
    """A tier that isolates; skips the others."""
    if not tier.is_isolated:
        pytest.skip("unsafe isolates nothing")
    return tier
