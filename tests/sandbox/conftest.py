"""One sandbox service for all tests of a session; the host's state is compared before and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sandbox.backends import processes
from sandbox.client import SandboxClient, SandboxSession

TOKEN = "token-of-the-tests"
SECOND_TOKEN = "token-of-somebody-else"


@dataclass(frozen=True)
class Service:
    """A running service process."""

    url: str
    process: subprocess.Popen[bytes]


def start_service(
    *flags: str, env: dict[str, str] | None = None, program: Sequence[str] = ("-m", "sandbox")
) -> Service:
    """`python -m sandbox` on a free port; raises RuntimeError when it ends instead."""
    read_fd, write_fd = os.pipe()
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, *program, "--port", "0", "--ready-fd", str(write_fd), *flags],
        env={**os.environ, "PYTHONPATH": root, "TEST_TOKENS": f"{TOKEN},{SECOND_TOKEN}", **(env or {})},
        pass_fds=[write_fd],
        start_new_session=True,
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        line = ready.readline()
    if not line:
        raise RuntimeError(f"the service ended with {process.wait(timeout=10)}")
    return Service(f"http://127.0.0.1:{json.loads(line)['port']}", process)


def stop_service(service: Service, signum: int = signal.SIGTERM) -> int:
    service.process.send_signal(signum)
    return service.process.wait(timeout=15)


def descendants(pid: int) -> set[int]:
    """Living processes below `pid` on this host."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, grew = {pid}, True
    while grew:
        below = {child for child, parent in parents.items() if parent in found}
        grew = not below <= found
        found |= below
    return found - {pid}


def is_running(pid: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    return processes.is_alive(pid)


def control_groups(pid: int) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"sandbox-{pid}*") if path.is_dir()]


def mounts(pid: int | str = "self") -> list[str]:
    """Mounts as a process sees them, without those of a Docker engine, which change at any time."""
    lines = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    return [line for line in lines if "docker" not in line and line.split()[2] not in ("overlay", "nsfs")]


@contextmanager
def own_tmp() -> Iterator[Path]:
    """A TMPDIR for one service, so that its leftovers are told from those of other services."""
    with tempfile.TemporaryDirectory(prefix="tmp-of-tests-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def wait_until(condition: Callable[[], object], deadline_s: float = 20.0) -> bool:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    mounts_before = mounts()
    service = start_service(
        *("--backend", "namespaces", "--slots", "4", "--warm", "4", "--token-env", "TEST_TOKENS"),
        *("--memory-bytes", str(256 * 1024**2), "--disk-bytes", str(32 * 1024**2), "--num-processes", "32"),
    )
    pid = service.process.pid
    yield service
    idle = 3 + 4  # the zygote's two processes, the janitor, and the warm sessions
    flat = wait_until(lambda: len(descendants(pid)) <= idle)
    running = descendants(pid)
    num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    exit_code = stop_service(service)
    assert flat, f"processes left: {running}"
    assert num_descriptors < 120
    assert exit_code == 0
    assert wait_until(lambda: not any(map(is_running, running))), "orphans after the stop"
    assert control_groups(pid) == []
    assert mounts() == mounts_before


@pytest.fixture
async def client(service: Service) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(service.url, TOKEN) as client:
        yield client


@pytest.fixture
async def session(client: SandboxClient) -> AsyncIterator[SandboxSession]:
    async with client.session() as session:
        yield session


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client that sends the tests' token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=20) as http:
        yield http
