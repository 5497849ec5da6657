"""Fixtures shared by all tests."""

import asyncio
import gc
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import device
from tests.docker_engine import NoEngine, docker_engine
from tests.workers import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_terminal_summary,
    pytest_xdist_make_scheduler,
)

# A busy machine makes examples slow, not wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """On a GPU machine, keep the process off the GPU unless `-m gpu` asks for it."""
    if device.HAS_GPU and not device.asks_for_gpu(config.getoption("markexpr")):
        device.compute_on_the_cpu()


def pytest_collection_finish() -> None:
    """Let the garbage collector look through fewer objects: no test drops the modules that are imported by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    """Libraries report what is frozen as leaked when the process ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where none is, or where it was not asked for."""
    mark = item.get_closest_marker("gpu")
    if mark and (reason := device.why_not(mark, markexpr=item.config.getoption("markexpr"), there=device.num_gpus())):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def docker_environment() -> Iterator[dict[str, str]]:
    """Environment variables with which `docker` and the SDK reach an engine that has the sandbox's image."""
    try:
        with docker_engine() as environment:
            yield {name: environment[name] for name in ("PATH", "DOCKER_HOST", "DOCKER_CONFIG") if name in environment}
    except NoEngine as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout: a random 2-layer Qwen3 (about 0.1 M parameters) and its tokenizer."""
    from agentrl.config import WarmstartConfig
    from trainer.warmstart.tiny_model import make_model, make_tokenizer, save

    texts = [
        'You may call <tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
        "<tool_response>\n42\n</tool_response> The answer is \\boxed{42}.",
        "def f(x):\n    return x % 7\n",
    ] * 4
    shape = WarmstartConfig(
        vocab_size=384, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = make_tokenizer(texts, shape.vocab_size)
    save(folder, make_model(shape, tokenizer, seed=0), tokenizer)
    return folder


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """A running vLLM: its base URL, its log, and the served name of `tiny_model_dir`."""

    url: str
    log_path: Path
    model: str


@pytest.fixture(scope="session")
def vllm_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """The real engine, started once with the command that a run uses, and killed after the tests."""
    with serving_tiny_model(tiny_model_dir, tmp_path_factory.mktemp("engine")) as server:
        yield server


@contextmanager
def serving_tiny_model(
    model: Path, folder: Path, dtype: str = "float32", engine: dict[str, Any] | None = None, **env_added: str
) -> Iterator[VLLMServer]:
    """A server of `model` with its log in `folder`, the settings `engine`, and `env_added` in its environment."""
    from agentrl.config import EngineConfig
    from agentrl.engine import vllm_command
    from agentrl.engine import vllm_server as engine_server
    from agentrl.supervision.serving import free_port

    server = VLLMServer(
        url=f"http://127.0.0.1:{(port := free_port())}",
        log_path=folder / "engine.log",
        model="policy",
    )
    argv, env = vllm_command.command(
        model_path=str(model),
        served_name=server.model,
        host="127.0.0.1",
        port=port,
        config=EngineConfig(**device.engine_settings(**(engine or {}))),
        max_context=1024,
        dtype=dtype,
        seed=0,
    )
    process = start_guarded(argv, {**env, **env_added}, server.log_path)
    try:
        waiting = engine_server.wait_ready(
            server.url, poll=process.poll, log=lambda: server.log_path.read_text()[-3000:], timeout_s=170
        )
        asyncio.run(waiting)
        yield server
    finally:
        kill_guarded(process)


def start_guarded(argv: list[str], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """A server under the guard of a run, which also removes its temporary files and semaphores."""
    from agentrl.supervision.process_tree import guarded_by

    guarded = [*guarded_by(uuid.uuid4().hex), *argv]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            guarded, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )


def kill_guarded(process: subprocess.Popen[bytes]) -> None:
    """Kill the server with its process group, as a crash would, and wait for its guard."""
    assert process.stdin is not None
    with suppress(ProcessLookupError, FileNotFoundError):
        for server in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(server), signal.SIGKILL)
    process.wait(timeout=10)
    process.stdin.close()
