"""Ray on two machines with addresses of their own (tests/machines.py): a part on the other, which is switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from tests import machines
from tests.machines import Machine, two_machines, without_rays

REASON = machines.why_not()
pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent
DRIVER = """
import asyncio, pathlib, sys
from agentrl.config.ray import RayConfig
from agentrl.supervision.child import ChildDied, never
from agentrl.supervision.place import Needs
from agentrl.supervision.ray_place import ray_place

def serve(spot):
    return [sys.executable, "-m", "http.server", "--bind", spot.host, str(spot.port)]

async def reached(host, port):
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
            return writer.close()
        except ConnectionRefusedError:
            await asyncio.sleep(0.1)

async def main():
    async with ray_place(RayConfig(address=sys.argv[1])) as place:
        needs, log = Needs(bundle={"far": 1.0}, port=0), pathlib.Path(sys.argv[2])
        async with place.child("server", serve, log_path=log, needs=needs, may_end=never) as part:
            await asyncio.wait_for(reached(part.spot.host, part.spot.port), 120)
            print(place.here, part.spot.host, flush=True)
            try:
                await part.watch()
            except ChildDied as error:
                print(error, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    quick = {"RAY_health_check_failure_threshold": "2", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**without_rays(os.environ), **tokens, **quick, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def pair(tmp_path: Path, env: dict[str, str]) -> Iterator[tuple[Machine, Machine]]:
    """A head without resources, and a machine with the resource `far`."""
    with two_machines(tmp_path / "machines") as (first, second):
        address = f"--node-ip-address={first.address}"
        ray(first, env, "--head", address, "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        ray(second, env, f"--address={first.address}:6379", "--num-cpus=1", '--resources={"far": 1}')
        yield first, second


def ray(machine: Machine, env: dict[str, str], *arguments: str) -> None:
    small = "--object-store-memory=80000000"
    command = [str(PROGRAMS / "ray"), "start", small, *arguments]
    process = machine.start(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said


def test_a_part_on_another_machine_is_reached_there_and_missed_when_it_is_switched_off(
    pair: tuple[Machine, Machine], env: dict[str, str], tmp_path: Path
) -> None:
    first, second = pair
    command = [sys.executable, "-c", DRIVER, f"{first.address}:6379", str(tmp_path / "log")]
    with first.start(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline().split() == [first.address, second.address]
            second.switch_off()
            said, _ = driver.communicate(timeout=100)
        finally:
            driver.kill()
    assert "its node went away" in said


OWN = """
import asyncio, pathlib, sys
from agentrl.config.ray import RayConfig
from agentrl.supervision.place import Needs
from agentrl.supervision.ray_place import ray_place

async def main():
    async with ray_place(RayConfig()) as place:
        needs, log = Needs(bundle={"CPU": 1.0}), pathlib.Path(sys.argv[1])
        async with place.child("part", ["echo", "from a part"], log_path=log, needs=needs) as part:
            print(await part.wait(), log.read_text())

asyncio.run(main())
"""


def test_on_a_machine_without_a_cluster_one_is_made_with_a_token(tmp_path: Path) -> None:
    env = without_rays(os.environ)
    with two_machines(tmp_path / "machines") as (first, _):
        command = [sys.executable, "-c", OWN, str(tmp_path / "log")]
        own = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        with first.start(command, cwd=ROOT, env={**env, **own}, stdout=subprocess.PIPE, text=True) as driver:
            said, _ = driver.communicate(timeout=200)
    assert said.split() == ["0", "from", "a", "part"]
