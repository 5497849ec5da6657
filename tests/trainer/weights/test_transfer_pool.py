"""One group of a real sender and two real servers: one dies in mid-update, the other goes on, and it returns."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import EngineConfig
from agentrl.engine import vllm_command, vllm_server
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError
from agentrl.supervision.serving import free_port
from agentrl.types import Sampling
from tests.conftest import kill_guarded, start_guarded
from tests.device import cpu_engine_only, engine_settings
from tests.trainer.weights.test_transfer import Engines, distance, learner, new_model, said

ROOT = Path(__file__).parents[3]
pytestmark = [cpu_engine_only("gloo is for CPUs"), pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(500)]


class Server:
    """A server of the tiny model, on a port of its own."""

    def __init__(self, model_dir: Path, log_path: Path, backend: str, plugins: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._model_dir, self._log_path, self._backend, self._plugins = model_dir, log_path, backend, plugins

    def start(self) -> None:
        argv, env = vllm_command.command(
            model_path=str(self._model_dir),
            served_name="policy",
            host="127.0.0.1",
            port=self.port,
            config=EngineConfig(**engine_settings(weight_transfer="gloo")),
            max_context=1024,
            dtype="float32",
            seed=0,
        )
        if self._backend == "nccl":  # which the command refuses without a GPU
            argv[argv.index("--weight-transfer-config") + 1] = json.dumps({"backend": "agentrl_nccl"})
            env["PYTHONPATH"] = f"{self._plugins}{os.pathsep}{ROOT}"
        self.process = start_guarded(argv, env, self._log_path)

    async def ready(self) -> None:
        await vllm_server.wait_ready(
            self.url, poll=self.process.poll, log=lambda: self._log_path.read_text()[-3000:], timeout_s=170
        )

    def kill(self) -> None:
        kill_guarded(self.process)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution whose entry point puts tests/fake_nccl.py into vLLM's processes."""
    folder = tmp_path_factory.mktemp("plugins")
    (info := folder / "fake_nccl-0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_nccl\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfake_nccl = tests.fake_nccl:plugin\n")
    return folder


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def servers(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, plugins: Path
) -> Iterator[tuple[str, list[Server]]]:
    logs = tmp_path_factory.mktemp(f"pool-{request.param}")
    both = [Server(tiny_model_dir, logs / f"{i}.log", request.param, plugins) for i in range(2)]
    for server in both:
        server.start()
    try:
        for server in both:
            asyncio.run(server.ready())
        yield request.param, both
    finally:
        for server in both:
            server.kill()


@pytest.fixture
async def pool(servers: tuple[str, list[Server]]) -> AsyncIterator[EnginePool]:
    updates = UpdateSettings(update_timeout_s=60)
    clients = [VLLMEngine(server.url, model="policy", updates=updates) for server in servers[1]]
    async with EnginePool(clients, return_timeout_s=120) as pool:
        yield pool


async def holds(url: str, model: Any) -> bool:
    async with VLLMEngine(url, model="policy") as engine:
        return await distance(engine, model) < 1e-4


async def test_one_of_two_engines_dies_while_both_receive(
    servers: tuple[str, list[Server]], pool: EnginePool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    backend, (victim, other) = servers
    new_model(tiny_model_dir, tmp_path / "old", seed=3)
    new = new_model(tiny_model_dir, tmp_path / "new", seed=4)
    engines: Any = Engines(pool)  # type: ignore[arg-type]
    task = {"backend": backend, "stall_at": 7, "stall_s": 1.0, "old_dir": str(tmp_path / "old")}
    async with learner(engines, tmp_path / "new", tmp_path, **task) as process:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 120) == b"stalled\n"
        victim.kill()
        errors = await said(process)
    assert process.returncode == 0, errors
    assert [ref.policy_version for ref in engines.refs][-1] == 2 and engines.blamed == []
    assert await holds(other.url, new)
    assert pool.metrics()["engine/num_serving"] == 1
    assert set((await pool.generate([1, 2], Sampling(max_tokens=4), request_id="1-0")).policy_versions()) == {2}
    victim.start()
    await victim.ready()
    async with asyncio.timeout(60):
        while not pool.wants_weights:
            await asyncio.sleep(0.1)
    async with learner(engines, tmp_path / "new", tmp_path, backend=backend, version=2) as process:
        errors = await said(process)
    assert process.returncode == 0, errors
    assert await holds(victim.url, new) and await holds(other.url, new)
    assert pool.metrics()["engine/num_serving"] == 2 and not pool.wants_weights

    async with VLLMEngine(other.url, model="policy") as engine:  # what is refused leaves a server that can be resumed
        await engine.control.pause(clear_cache=True)
        with pytest.raises(EngineError, match="the learner's update lacks"):
            foreign = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
            await engine.control.load(foreign, version=9, timeout_s=60)
        await engine.control.resume()
        assert await engine.version() == 2 and set(await engine.control.checksums()) == {engines.refs[-1].checksum}
    assert await holds(other.url, new)
