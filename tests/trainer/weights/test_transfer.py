"""Weight transfer from a real learner-side process, through the orchestrator's routes, into a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.engine.base import Receivers
from agentrl.engine.checksum import checksum_of
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import EngineError, RunOver, WeightsWanted, WeightSyncError
from agentrl.supervision.serving import serving
from agentrl.training.learner_api import create_app
from agentrl.types import Batch, Probe, StepOutput, TransferInit, WeightsRef
from tests.conftest import VLLMServer, serving_tiny_model
from tests.device import cpu_engine_only, parity_bound, without_gpus
from tests.one_session import OneSession
from tests.trainer.trainer_builders import plain_logprobs
from trainer.weights import folder as weights
from trainer.weights.delta import DeltaFolders
from trainer.weights.source import WeightSource

TEXT = list(range(100, 180))
GLOO = cpu_engine_only("gloo is for CPUs; `pytest -m gpu` sends by nccl and ipc")


class Engines:
    """The orchestrator's port: one real engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self.refs: list[WeightsRef] = []
        self.failures: list[EngineError] = []
        self.blamed: list[EngineError] = []  # errors that would end a run

    async def next_batch(self, policy_version: int, num_known: int) -> Batch:
        raise RunOver

    async def step_done(self, output: StepOutput) -> None:
        raise AssertionError("no step is made here")

    async def finished(self) -> None:
        raise AssertionError("no run is made here")

    async def receivers(self, policy_version: int) -> Receivers:
        return await self.engine.receivers(policy_version)

    async def transfer_opened(self, init: TransferInit) -> None:
        await self.engine.init_transfer(init)

    async def weights_published(self, ref: WeightsRef) -> None:
        self.refs.append(ref)
        try:
            await self.engine.update_weights(ref)
        except EngineError as error:
            self.failures.append(error)
            raise

    async def engine_failed(self, error: EngineError) -> None:
        self.blamed.append(error)


@pytest.fixture(scope="module")
def gloo(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A server of the tiny model that receives its weights over gloo."""
    settings = {"weight_transfer": "gloo"}
    with serving_tiny_model(tiny_model_dir, tmp_path_factory.mktemp("gloo"), engine=settings) as server:
        yield server


@pytest.fixture
async def engines(gloo: VLLMServer) -> AsyncIterator[Engines]:
    async with VLLMEngine(gloo.url, model=gloo.model, updates=UpdateSettings(update_timeout_s=60)) as engine:
        yield Engines(engine)


def new_model(base: Path, folder: Path, *, seed: int) -> Any:
    """The tiny model with noise on every weight, and its folder."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return model


async def distance(engine: VLLMEngine, model: Any) -> float:
    """Largest |engine - transformers| logprob on a text that is not the probe."""
    with torch.no_grad():
        expected = plain_logprobs(model, TEXT).tolist()
    return max(abs(a - b) for a, b in zip(await engine.score(TEXT), expected, strict=True))


@asynccontextmanager
async def learner(
    engines: Engines, model_dir: Path, tmp_path: Path, *, num_ranks: int = 1, **task: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The sending process; killed at the end."""
    script = str(Path(__file__).with_name("sending_ranks.py"))
    launcher = [sys.executable, script]
    if num_ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        launcher.append(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **without_gpus()}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        env.pop(name, None)
    async with serving(create_app(OneSession(engines), token="secret"), host="127.0.0.1", port=0) as url:
        defaults = {
            "backend": "gloo",
            "timeout_s": 60.0,
            "stages": [-1],
            "stall_at": -1,
            "stall_s": 600.0,
            "old_dir": None,
            "version": 1,
        }
        settings = {"model_dir": str(model_dir), "weights_dir": str(tmp_path / "weights"), "url": url}
        process = await asyncio.create_subprocess_exec(
            *launcher,
            json.dumps({**defaults, **settings, **task}),
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


def written(model: Any, folder: Path, version: int, **limits: int) -> WeightsRef:
    """The model's weights as the learner would publish them to a folder."""
    source = WeightSource(model, dtype=torch.float32)
    return weights.publish(source, folder, policy_version=version, probe=probe_of(model), **limits)


def probe_of(model: Any) -> Probe:
    ids = tuple(TEXT[:40])
    with torch.no_grad():
        return Probe(token_ids=ids, logprobs=tuple(plain_logprobs(model, ids).tolist()))


async def said(process: asyncio.subprocess.Process) -> str:
    _, stderr = await asyncio.wait_for(process.communicate(), 120)
    return stderr.decode()


@GLOO
@pytest.mark.slow
@pytest.mark.engine
async def test_streamed_weights_arrive_and_are_proven(engines: Engines, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = new_model(tiny_model_dir, tmp_path / "new", seed=1)
    assert await distance(engines.engine, model) > 0.1
    async with learner(engines, tmp_path / "new", tmp_path) as process:
        errors = await said(process)
    assert process.returncode == 0, errors
    assert await distance(engines.engine, model) < parity_bound()
    sums = {checksum_of(WeightSource(model, dtype=torch.float32)), engines.refs[-1].checksum}
    assert sums == set(await engines.engine.control.checksums())
    assert await engines.engine.version() == 1


@GLOO
@pytest.mark.slow
@pytest.mark.engine
async def test_two_ranks_send_under_every_zero_stage(engines: Engines, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = new_model(tiny_model_dir, tmp_path / "new", seed=2)
    async with learner(engines, tmp_path / "new", tmp_path, num_ranks=2, stages=[1, 2, 3]) as process:
        errors = await said(process)
    assert process.returncode == 0, errors
    assert [ref.policy_version for ref in engines.refs] == [1, 2, 3]
    assert len({ref.checksum for ref in engines.refs}) == 1
    assert await distance(engines.engine, model) < parity_bound()


@GLOO
@pytest.mark.slow
@pytest.mark.engine
async def test_a_learner_killed_while_it_sends_leaves_the_old_weights_serving(
    engines: Engines, tiny_model_dir: Path, tmp_path: Path
) -> None:
    old = new_model(tiny_model_dir, tmp_path / "old", seed=3)
    new = new_model(tiny_model_dir, tmp_path / "new", seed=4)
    async with learner(engines, tmp_path / "new", tmp_path, stall_at=7, old_dir=str(tmp_path / "old")) as process:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 120) == b"stalled\n"
        killed_s = time.monotonic()
        os.killpg(process.pid, signal.SIGKILL)
        while not engines.failures:
            assert time.monotonic() - killed_s < 10
            await asyncio.sleep(0.05)
    assert engines.blamed == []  # a run waits for the next learner
    assert await distance(engines.engine, old) < parity_bound()
    async with learner(engines, tmp_path / "new", tmp_path) as process:
        errors = await said(process)
    assert process.returncode == 0, errors
    assert await distance(engines.engine, new) < parity_bound()


@GLOO
@pytest.mark.slow
@pytest.mark.engine
async def test_a_learner_that_hangs_while_it_sends_meets_the_deadline(
    engines: Engines, tiny_model_dir: Path, tmp_path: Path
) -> None:
    old = new_model(tiny_model_dir, tmp_path / "old", seed=5)
    new_model(tiny_model_dir, tmp_path / "new", seed=12)
    task = {"stall_at": 3, "timeout_s": 3.0, "old_dir": str(tmp_path / "old")}
    async with learner(engines, tmp_path / "new", tmp_path, **task) as process:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 120) == b"stalled\n"
        stalled_s = time.monotonic()
        while not engines.failures:
            assert time.monotonic() - stalled_s < 10
            await asyncio.sleep(0.05)
    assert await distance(engines.engine, old) < parity_bound()


@GLOO
@pytest.mark.slow
@pytest.mark.engine
async def test_another_models_weights_are_refused_before_they_travel(
    engines: Engines, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.config.layer_types = model.config.layer_types[:1]
    model.save_pretrained(tmp_path / "other")
    async with learner(engines, tmp_path / "other", tmp_path) as process:
        errors = await said(process)
    assert process.returncode == 1
    assert "LearnerError" in errors and "lacks" in errors and "layers.1" in errors


@pytest.fixture
async def shared(vllm_server: VLLMServer, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[VLLMServer]:
    """The session's server, which reads folders. Its first weights are restored afterwards."""
    yield vllm_server
    first = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32").eval()
    async with VLLMEngine(vllm_server.url, model=vllm_server.model) as engine:
        await engine.update_weights(written(first, tmp_path / "first", 0))


@pytest.mark.engine
async def test_a_folder_arrives_and_is_proven(shared: VLLMServer, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = new_model(tiny_model_dir, tmp_path / "new", seed=6)
    async with VLLMEngine(shared.url, model=shared.model) as engine:
        engines = Engines(engine)
        async with learner(engines, tmp_path / "new", tmp_path, backend="safetensors") as process:
            errors = await said(process)
        assert process.returncode == 0, errors
        assert await distance(engine, model) < parity_bound()
        assert set(await engine.control.checksums()) == {engines.refs[0].checksum}


@pytest.mark.engine
@pytest.mark.parametrize("by_folder", [False, True])
async def test_a_folder_in_shards_arrives(
    shared: VLLMServer, tiny_model_dir: Path, tmp_path: Path, by_folder: bool
) -> None:
    model = new_model(tiny_model_dir, tmp_path / "new", seed=7)
    ref = written(model, tmp_path / "weights", 1, max_shard_bytes=200_000)
    assert len(list(Path(str(ref.path)).glob("model-*.safetensors"))) > 1
    ref = replace(ref, checksum="" if by_folder else ref.checksum)
    async with VLLMEngine(shared.url, model=shared.model, updates=UpdateSettings(by_folder=by_folder)) as engine:
        await engine.update_weights(ref)
        assert await distance(engine, model) < parity_bound()


@pytest.mark.engine
async def test_only_what_changed_arrives_and_damage_to_it_is_mended(
    shared: VLLMServer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Two publications of changes, the second of them damaged on the disk."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="float32").eval()
    folders = DeltaFolders(tmp_path, whole_every=4)
    async with VLLMEngine(shared.url, model=shared.model) as engine:
        for version in (1, 2, 3):
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[:, version] += 0.5
            source = WeightSource(model, dtype=torch.float32)
            ref = folders.publish(source, policy_version=version, probe=probe_of(model))
            if version == 3:
                file = Path(ref.update_info["deltas"][-1]) / "delta-00001.safetensors"
                tensors = load_file(file)
                save_file({name: tensor * 1 + ("values" in name) for name, tensor in tensors.items()}, file)
                with pytest.raises(WeightsWanted):
                    await engine.update_weights(ref)
                assert await engine.control.is_paused()
                ref = folders.whole_again()
            await engine.update_weights(ref)
            assert len(ref.update_info.get("deltas", [])) == (1 if version == 2 else 0)
            assert await distance(engine, model) < parity_bound()
            assert await engine.version() == version


@pytest.mark.engine
async def test_a_flipped_bit_is_seen(shared: VLLMServer, tiny_model_dir: Path, tmp_path: Path) -> None:
    ref = written(new_model(tiny_model_dir, tmp_path / "new", seed=8), tmp_path / "weights", 1)
    file = Path(str(ref.path)) / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1000] ^= 1
    file.write_bytes(damaged)
    async with VLLMEngine(shared.url, model=shared.model) as engine:
        with pytest.raises(WeightSyncError, match=f"checksum .*not {ref.checksum}"):
            await engine.update_weights(ref)


@pytest.mark.engine
@pytest.mark.parametrize("damage", ["cut off", "missing", "other model"])
async def test_a_folder_that_is_refused_leaves_the_old_weights_serving(
    shared: VLLMServer, tiny_model_dir: Path, tmp_path: Path, damage: str
) -> None:
    old = new_model(tiny_model_dir, tmp_path / "old", seed=9)
    ref = written(new_model(tiny_model_dir, tmp_path / "new", seed=10), tmp_path / "weights", 2)
    file = Path(str(ref.path)) / "model.safetensors"
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "missing":
        file.unlink()
    else:
        save_file({"unheard.of": torch.ones(2)}, file)
    async with VLLMEngine(shared.url, model=shared.model) as engine:
        await engine.update_weights(written(old, tmp_path / "older", 1))
        await engine.control.pause(clear_cache=True)
        with pytest.raises(EngineError):
            await engine.control.load(ref.update_info, version=2, timeout_s=30)
        await engine.control.resume()
        assert await distance(engine, old) < parity_bound()
        assert await engine.version() == 1
