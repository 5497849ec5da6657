"""Parts on the nodes of a real Ray cluster of several raylets on 127.0.0.1. `make test-ray` has the package."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

# Both are read once, when Ray is imported; the second keeps it on loopback.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from agentrl.config.ray import RayConfig  # noqa: E402
from agentrl.errors import ConfigError, InfraError  # noqa: E402
from agentrl.supervision import child as supervise  # noqa: E402
from agentrl.supervision import ray_cluster  # noqa: E402
from agentrl.supervision.child import ChildDied, never  # noqa: E402
from agentrl.supervision.orphan_guard import processes  # noqa: E402
from agentrl.supervision.place import Needs  # noqa: E402
from agentrl.supervision.ray_place import RayPlace, ray_place  # noqa: E402
from tests.agentrl.supervision.test_child import alive, pids_in  # noqa: E402
from tests.agentrl.supervision.test_place import serve  # noqa: E402
from tests.agentrl.supervision.test_process_trees import COMMAND, all_ended, kill  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

MARK = "AGENTRL_TEST_CLUSTER"
"""In the environment of all processes of the cluster and of its parts."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without room for parts, and a node with two pretended GPUs."""
    from ray.cluster_utils import Cluster

    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("0123456789abcdef" * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, uuid.uuid4().hex)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_health_check_failure_threshold", "2")
        made = Cluster(initialize_head=True, head_node_args=node_arguments(num_cpus=0))
        made.add_node(**node_arguments(num_cpus=2, num_gpus=2, resources={"engines": 1}))
        yield made
        made.shutdown()


def node_arguments(**resources: Any) -> dict[str, Any]:
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    return {"node_ip_address": "127.0.0.1", **small, **resources}


@pytest.fixture
async def place(cluster: Any) -> AsyncIterator[RayPlace]:
    async with ray_place(RayConfig(address=cluster.address, grant_timeout_s=20)) as place:
        yield place


async def test_a_part_lands_where_it_is_asked_for_and_its_gpus_log_and_end_are_known(
    place: RayPlace, tmp_path: Path
) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SECRET'], flush=True); exit(3)"
    needs = Needs(bundle={"engines": 1.0, "GPU": 2.0})
    async with place.child(
        "engine", [sys.executable, "-c", code], log_path=tmp_path / "log", needs=needs, env={"SECRET": "hush"}
    ) as part:
        with pytest.raises(ChildDied, match=r"(?s)engine process ended with exit code 3\. The end of .*0,1 hush"):
            await part.watch()


async def test_a_part_has_the_environment_of_its_node_and_not_rays_number_of_threads(
    place: RayPlace, tmp_path: Path
) -> None:
    code = f"import os; print(os.environ['{MARK}'], os.environ.get('OMP_NUM_THREADS'))"
    async with place.child(
        "engine", [sys.executable, "-c", code], log_path=tmp_path / "log", needs=Needs(bundle={"CPU": 2.0})
    ) as part:
        assert await part.wait() == 0
    assert (tmp_path / "log").read_text().split() == [os.environ[MARK], "None"]


async def test_a_secret_is_in_no_command_line_of_the_machine(place: RayPlace, tmp_path: Path) -> None:
    env, needs = {"SECRET": "hush-hush-hush"}, Needs(bundle={"CPU": 1.0})
    async with place.child("engine", COMMAND, log_path=tmp_path / "log", needs=needs, env=env):
        await pids_in(tmp_path / "log")
        lines = [command_line(pid) for pid, _, _ in processes()]
        assert sum(b"VLLM" in line for line in lines) >= 1
        assert not any(b"hush-hush-hush" in line for line in lines)


def command_line(pid: int) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def test_a_part_that_listens_is_reached_at_its_spot_and_gone_after_the_block(
    place: RayPlace, tmp_path: Path
) -> None:
    async with place.child(
        "server", serve, log_path=tmp_path / "log", needs=Needs(bundle={"CPU": 1.0}, port=0)
    ) as part:
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection(part.spot.host, part.spot.port)
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
        writer.close()
        assert await part.wait() == 0
    async with place.child("tree", COMMAND, log_path=tmp_path / "tree", needs=Needs(bundle={"CPU": 2.0})):
        pids = await pids_in(tmp_path / "tree")  # the resources of the part before are free again
    assert all_ended(pids, 1.0)


async def test_a_killed_guard_is_named_and_its_tree_ended_and_restarted(
    place: RayPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)
    needs = Needs(bundle={"CPU": 1.0})
    async with place.child("engine", COMMAND, log_path=tmp_path / "log", needs=needs, may_end=never) as part:
        pids = await pids_in(tmp_path / "log")
        part.allow_restarts(1)
        watching = asyncio.create_task(part.watch())
        kill(next(parent for pid, parent, _ in processes() if pid == pids[0]), pids[0])
        await until(lambda: part.num_starts == 2 and len((tmp_path / "log").read_text().splitlines()) == 2)
        again = [int(word) for word in (tmp_path / "log").read_text().split()][4:]
        assert all_ended(pids, 1.0) and all(map(alive, again))
        kill(again[0])
        with pytest.raises(ChildDied, match="exit code 137"):
            await watching
    assert all_ended(again, 1.0)


async def until(holds: Callable[[], bool], within_s: float = 30) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def two_spares(cluster: Any) -> AsyncIterator[list[Any]]:
    nodes = [cluster.add_node(**node_arguments(num_cpus=1, resources={"spare": 1})) for _ in range(2)]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node in cluster.worker_nodes:
                await asyncio.to_thread(cluster.remove_node, node)


async def test_a_part_whose_node_goes_away_comes_back_on_another(
    cluster: Any, place: RayPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)
    needs = Needs(bundle={"spare": 1.0, "CPU": 1.0}, port=0)
    async with (
        two_spares(cluster) as nodes,
        place.child("engine", COMMAND, log_path=tmp_path / "log", needs=needs, may_end=never) as part,
    ):
        pids, first = await pids_in(tmp_path / "log"), part.spot
        part.allow_restarts(1)
        watching = asyncio.create_task(part.watch())
        used = node_of(nodes, "spare")
        await asyncio.to_thread(cluster.remove_node, used, allow_graceful=False)
        await until(lambda: len((tmp_path / "log").read_text().splitlines()) == 2, 60)
        assert "its node went away" in caplog.text
        assert part.spot.url != first.url
        assert all_ended(pids, 10.0), "the guard saw its input end"
        watching.cancel()


def node_of(nodes: list[Any], kind: str) -> Any:
    """The one whose resource is taken."""
    free_by_id = ray._private.state.available_resources_per_node()
    (used,) = (node for node in nodes if not free_by_id.get(node.node_id, {}).get(kind))
    return used


async def test_a_part_on_several_machines_starts_on_each_with_one_meeting_point(
    cluster: Any, place: RayPlace, tmp_path: Path
) -> None:
    needs = Needs(bundle={"spare": 1.0}, machines=2)
    async with two_spares(cluster):
        async with place.child(
            "learner",
            lambda spot: ["echo", str(spot.machine), spot.meeting],
            log_path=tmp_path / "learner.log",
            needs=needs,
        ) as part:
            assert await part.wait() == 0
        said = [(tmp_path / name).read_text().split() for name in ("learner.log", "learner-1.log")]
        assert [words[0] for words in said] == ["0", "1"]
        assert said[0][1] == said[1][1] == f"127.0.0.1:{part.spot.port}"
        fails_on_1 = "import sys, time; sys.argv[1] == '1' and sys.exit(5); time.sleep(60)"
        async with place.child(
            "learner",
            lambda spot: [sys.executable, "-c", fails_on_1, str(spot.machine)],
            log_path=tmp_path / "fails.log",
            needs=needs,
        ) as part:
            assert await part.wait() == 5


async def test_small_parts_that_start_first_leave_room_for_large_ones_that_are_reserved(
    cluster: Any, place: RayPlace, tmp_path: Path
) -> None:
    """Ray alone puts the two small ones on two nodes, and the large one has none."""
    small, large = (Needs(part=part, bundle={"slot": number}) for part, number in (("engine", 1.0), ("learner", 2.0)))
    nodes = [cluster.add_node(**node_arguments(num_cpus=1, resources={"slot": 2})) for _ in range(2)]
    try:
        await place.reserve([small, small, large])
        async with AsyncExitStack() as stack:
            for number, needs in enumerate((small, small, large)):
                log = tmp_path / str(number)
                await stack.enter_async_context(place.child(str(needs.part), COMMAND, log_path=log, needs=needs))
                await pids_in(log)
    finally:
        for node in nodes:
            await asyncio.to_thread(cluster.remove_node, node)


async def test_more_than_there_is_ends_in_a_table(cluster: Any, tmp_path: Path) -> None:
    async with ray_place(RayConfig(address=cluster.address, grant_timeout_s=1)) as place:
        with pytest.raises(InfraError) as found:
            async with place.child("engine", COMMAND, log_path=tmp_path / "log", needs=Needs(bundle={"GPU": 3.0})):
                pass
    lines = str(found.value).splitlines()
    assert lines[0] == "Ray had no room for the engine within 1 s (ray.grant_timeout_s):"
    assert lines[1] == "asked for: 1 x {GPU: 3}"
    assert any(line.endswith("2/2") for line in lines)


OWNER = f"""
import asyncio, pathlib, sys
from agentrl.config.ray import RayConfig
from agentrl.supervision.place import Needs
from agentrl.supervision.ray_place import ray_place

async def main():
    async with ray_place(RayConfig(address=sys.argv[1])) as place:
        command, log = {COMMAND!r}, pathlib.Path(sys.argv[2])
        async with place.child("part", command, log_path=log, needs=Needs(bundle={{"CPU": 1.0}})):
            await asyncio.sleep(120)

asyncio.run(main())
"""


def hears_ctrl_c() -> None:
    """A shell's background processes ignore SIGINT, and so do those that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_the_parts_of_a_run_that_ends_or_is_killed_are_gone_within_10_s(
    cluster: Any, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", OWNER, cluster.address, str(tmp_path / "log")]
    owner = subprocess.Popen(command, preexec_fn=hears_ctrl_c)
    try:
        async with asyncio.timeout(40):
            pids = await pids_in_slowly(tmp_path / "log")
        owner.send_signal(number)
        await asyncio.to_thread(owner.wait, 60)
        assert await asyncio.to_thread(all_ended, pids, 20.0)  # 10 s, and more on a busy machine
    finally:
        owner.kill()
        owner.wait()


async def pids_in_slowly(log: Path) -> list[int]:
    await until(lambda: log.exists() and bool(log.read_text().strip()), 40)
    return await pids_in(log)


OPEN = """
import asyncio, os
from ray.cluster_utils import Cluster
from agentrl.config.ray import RayConfig
from agentrl.supervision.ray_place import ray_place

async def main():
    cluster = Cluster(initialize_head=True, head_node_args=%r)
    try:
        async with ray_place(RayConfig(address=cluster.address, allow_without_token=True)) as place:
            print("here", place.here)
        async with ray_place(RayConfig(address=cluster.address)):
            print("joined")
    finally:
        cluster.shutdown()

asyncio.run(main())
"""


def test_a_cluster_that_requires_no_token_is_refused_unless_allowed() -> None:
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    script = OPEN % node_arguments(num_cpus=1)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["here", "127.0.0.1"]
    assert "requires no token" in done.stderr and "ray.allow_without_token=true" in done.stderr
    assert ConfigError.__name__ in done.stderr


def test_a_head_that_does_not_say_whether_it_requires_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PROBE_S", 3.0)
    with pytest.raises(
        ConfigError, match=r"could not be found out: no answer within 3 s\. Try again, or set ray\.allow"
    ):
        ray_cluster._is_open("127.0.0.1:1")
