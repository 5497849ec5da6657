"""A real vLLM server that dies, hangs, or cannot start: what its users see, and what is kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl import config as configs
from agentrl.config import Config
from agentrl.engine import launch_servers
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.errors import EngineError, EngineGone
from agentrl.supervision.child import Child, ChildDied
from agentrl.supervision.orphan_guard import processes
from agentrl.supervision.serving import free_port
from agentrl.training import launch
from agentrl.types import Completion, Sampling
from tests.agentrl.engine.judge import PROMPT, Judge, worst
from tests.device import engine_settings, parity_bound

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BOUND = parity_bound()


def config_for(model: Path, **engine: Any) -> Config:
    tree = {
        "name": "failures",
        "env": {"target": "envs.modmath:ModMath"},
        "model": {"path": str(model)},
        "rollout": {"max_context": 1024},
        "engine": engine_settings(stream_interval=1, **engine),
    }
    return configs.parse(tree, source="test")


@asynccontextmanager
async def serving(config: Config, logs: Path) -> AsyncIterator[tuple[VLLMEngine, Child]]:
    """The engine as a run starts and watches it."""
    async with (
        launch_servers.engine_servers(config, model_path=config.model.path, logs=logs) as servers,
        launch.watching(*launch_servers.parts_of(servers)),
    ):
        await launch_servers.engines_ready(servers, config.engine)
        async with launch_servers.engine_client(servers, config) as engine:
            assert isinstance(engine, VLLMEngine)
            yield engine, launch_servers.parts_of(servers)[0]


def server_of(part: Child) -> int:
    """Process group of the server below the guard."""
    children = Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text().split()
    return int(children[0])


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # its parent was killed, and the kernel was faster
            os.kill(pid, signal.SIGKILL)


def is_engine_process(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def unique() -> str:
    return uuid.uuid4().hex


def start_many(engine: VLLMEngine, count: int, max_tokens: int) -> list[asyncio.Task[Completion]]:
    sampling = Sampling(max_tokens=max_tokens)
    return [
        asyncio.create_task(engine.generate([*PROMPT, i], sampling, request_id=unique())) for i in range(5, 5 + count)
    ]


async def until_streaming(engine: VLLMEngine, num_tokens: int) -> None:
    async with asyncio.timeout(120):
        while (
            sum(len(stream.certain_part(Sampling(max_tokens=1)).token_ids) for stream in engine._generation._streams)
            < num_tokens
        ):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_server_that_dies_comes_back_with_its_weights_and_goes_on_where_it_was(
    tiny_model_dir: Path, judge: Judge, tmp_path: Path
) -> None:
    with pytest.raises(ChildDied, match="exit code 137"):
        async with serving(config_for(tiny_model_dir, max_restarts=3), tmp_path) as (engine, part):
            await engine.update_weights(judge.ref(1, 1))
            await while_nobody_asks(engine, part, judge)
            await in_mid_generation(engine, part, judge)
            await in_mid_update(engine, part, judge)
            await hanging_for_a_while(engine, part, judge)
            await once_more_than_allowed(engine, part)


async def while_nobody_asks(engine: VLLMEngine, part: Child, judge: Judge) -> None:
    server = server_of(part)
    (engine_process,) = (pid for pid, parent, _ in processes() if parent == server and is_engine_process(pid))
    kill(part.process.pid, server)  # its guard too: what computes is left to the supervisor
    async with asyncio.timeout(120):
        while part.num_starts == 1:
            await asyncio.sleep(0.1)
        assert not is_engine_process(engine_process)
        while True:
            try:
                await engine.health()
                break
            except EngineGone:
                await asyncio.sleep(0.2)
    completion = await engine.generate(PROMPT, Sampling(max_tokens=16), request_id=unique())
    assert set(completion.policy_versions()) == {1}
    assert worst(completion, PROMPT, judge, 0) < BOUND


async def in_mid_generation(engine: VLLMEngine, part: Child, judge: Judge) -> None:
    running = start_many(engine, 6, 600)
    await until_streaming(engine, 200)
    os.killpg(server_of(part), signal.SIGKILL)
    completions = await asyncio.gather(*running)
    assert engine.metrics()["engine/restarts"] == 2
    assert engine.metrics()["engine/salvaged_tokens"] >= 200
    for i, completion in enumerate(completions):
        assert set(completion.policy_versions()) == {1}  # not the weights it was restarted from
        assert worst(completion, [*PROMPT, 5 + i], judge, 0) < BOUND


async def in_mid_update(engine: VLLMEngine, part: Child, judge: Judge) -> None:
    running = start_many(engine, 4, 600)
    await until_streaming(engine, 40)
    with dying_before(engine, "load", lambda: os.killpg(server_of(part), signal.SIGKILL)):
        update = await engine.update_weights(judge.ref(2, 0))
    assert update.parity is not None and update.parity.max_abs < BOUND
    assert engine.metrics()["engine/restarts"] == 3
    for i, completion in enumerate(await asyncio.gather(*running)):
        assert set(completion.policy_versions()) <= {1, 2}
        assert worst(completion, [*PROMPT, 5 + i], judge, 0) < BOUND


async def hanging_for_a_while(engine: VLLMEngine, part: Child, judge: Judge) -> None:
    async with VLLMEngine(engine.url, request_timeout_s=2.0) as impatient:
        os.killpg(server_of(part), signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"not answered within 2 s"):
            await impatient.generate(PROMPT, Sampling(max_tokens=4), request_id=unique())
        os.killpg(server_of(part), signal.SIGCONT)
        completion = await impatient.generate(PROMPT, Sampling(max_tokens=4), request_id=unique())
        assert worst(completion, PROMPT, judge, 0) < BOUND


async def once_more_than_allowed(engine: VLLMEngine, part: Child) -> None:
    running = start_many(engine, 6, 900)
    await until_streaming(engine, 5)
    os.killpg(server_of(part), signal.SIGKILL)
    await asyncio.gather(*running, asyncio.sleep(120))  # ChildDied ends this; requests may all have been answered


@contextmanager
def dying_before(engine: VLLMEngine, verb: str, kill: Callable[[], None]) -> Iterator[None]:
    """The server is killed once, just before it is asked to do `verb`."""
    asked: Callable[..., Awaitable[Any]] = getattr(engine.control, verb)

    async def killed_first(*args: Any, **options: Any) -> Any:
        patch.undo()
        kill()
        return await asked(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.control, verb, killed_first)
        yield


async def cannot_start(config: Config, logs: Path) -> str:
    with pytest.raises(EngineError) as caught:
        async with launch_servers.engine_servers(config, model_path=config.model.path, logs=logs) as servers:
            await launch_servers.engines_ready(servers, config.engine)
    return str(caught.value)


OWNER = """
import asyncio, pathlib, sys
from agentrl import config as configs
from agentrl.engine import launch_servers

async def main():
    config = configs.load(pathlib.Path(sys.argv[1]))
    logs = pathlib.Path(sys.argv[2])
    async with launch_servers.engine_servers(config, model_path=config.model.path, logs=logs) as servers:
        await launch_servers.engines_ready(servers, config.engine)
        print(servers[0].part.process.pid, flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_engine_process_ends_by_itself_when_all_others_were_killed_at_once(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(config_for(tiny_model_dir).model_dump_json())
    arguments = [sys.executable, "-c", OWNER, str(config), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        guard = int(owner.stdout.readline())
        (server,) = (pid for pid, parent, _ in processes() if parent == guard)
        (left,) = (pid for pid, parent, _ in processes() if parent == server and is_engine_process(pid))
        kill(owner.pid, guard, server)
    deadline = time.monotonic() + 5
    while is_engine_process(left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_engine_process(left)


@pytest.mark.slow
async def test_a_cache_larger_than_the_memory_names_the_setting(tiny_model_dir: Path, tmp_path: Path) -> None:
    message = await cannot_start(config_for(tiny_model_dir, kv_cache_bytes=2**45), tmp_path)
    assert "ran out of memory: lower engine.kv_cache_bytes" in message
    assert "The end of its log:" in message


@pytest.mark.slow
async def test_a_model_that_vllm_does_not_know_is_said_to_be_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unheard-of"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardOfForCausalLM"]}))
    message = await cannot_start(config_for(folder), tmp_path)
    assert "cannot serve the architecture" in message


async def test_a_server_that_is_not_there_is_waited_for_and_then_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    config = config_for(tiny_model_dir, url=f"http://127.0.0.1:{port}", start_timeout_s=0.5)
    message = await cannot_start(config, tmp_path)
    assert f"the engine at http://127.0.0.1:{port} was not ready within 0.5 s" in message
