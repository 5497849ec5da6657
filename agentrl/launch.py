"""Starts each part of a run as a process of its own, or joins the one that a URL names. Knows no training loop."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl import engine_server
from agentrl.config import Config, EngineConfig
from agentrl.engine import VLLMEngine
from agentrl.errors import ConfigError, SandboxError
from agentrl.supervise import Child, child

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

SERVED_NAME = "policy"
TOKEN_VARIABLE = "AGENTRL_TOKEN"
SANDBOX_START_TIMEOUT_S = 60.0
WEIGHTS_PREFIX = "agentrl-weights-"
PARITY_BOUNDS = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest allowed |engine - learner| logprob by model.dtype: some ten times what benchmarks/engine.md measures."""


def port_of(host: str, port: int, *, key: str) -> int:
    """`port`, or a free one for 0. Raises ConfigError, naming the setting, when it is taken."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{key}: cannot listen on {host}:{port}: {error.strerror}. Choose another, or 0 for any free port"
            ) from error
        return int(sock.getsockname()[1])


@asynccontextmanager
async def watching(*parts: Child) -> AsyncIterator[None]:
    """Cancel the block, and raise ChildDied, when one of the parts ends while the block runs."""
    try:
        async with asyncio.TaskGroup() as watchers:
            tasks = [watchers.create_task(part.watch(), name=f"watch {part.name}") for part in parts]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def sandbox_service(
    config: Config, *, logs: Path, token: str
) -> AsyncIterator[tuple[SandboxClient, list[Child]]]:
    """The sandbox of `config.sandbox`: started here, or joined where `url` is set. Raises SandboxError, ConfigError."""
    from sandbox.client import SandboxClient

    settings = config.sandbox
    if settings.url is not None:
        async with SandboxClient(settings.url, token=token) as client:
            yield client, []
        return
    port = port_of(settings.host, settings.port, key="sandbox.port")
    command = [
        *(sys.executable, "-m", "sandbox", "--host", settings.host, "--port", str(port)),
        *("--backend", settings.backend, "--slots", str(settings.slots), "--token-env", TOKEN_VARIABLE),
        *("--memory-bytes", str(settings.memory_bytes), *(["--allow-unsafe"] if settings.allow_unsafe else [])),
    ]
    env = {TOKEN_VARIABLE: token}
    async with (
        child("sandbox", command, log_path=logs / "sandbox.log", env=env) as part,
        SandboxClient(f"http://{settings.host}:{port}", token=token) as client,
    ):
        yield client, [part]


async def sandbox_ready(client: SandboxClient, parts: Sequence[Child]) -> None:
    """Wait until it answers. Raises ChildDied or SandboxError with the end of its log."""
    from sandbox.client import SandboxUnavailable

    try:
        async with watching(*parts), asyncio.timeout(SANDBOX_START_TIMEOUT_S):
            while True:
                try:
                    await client.health()
                    return
                except SandboxUnavailable:
                    await asyncio.sleep(0.05)
    except TimeoutError as error:
        tails = "\n".join(part.log_tail() for part in parts)
        raise SandboxError(f"the sandbox did not answer within {SANDBOX_START_TIMEOUT_S:g} s.\n{tails}") from error


@asynccontextmanager
async def engine_process(config: Config, *, model_path: str, logs: Path) -> AsyncIterator[tuple[str, list[Child]]]:
    """Base URL of the engine of `config.engine`, which may still be starting: wait with `engine_ready`."""
    settings = config.engine
    if settings.url is not None:
        yield settings.url, []
        return
    url, command, env = _engine_command(config, model_path)
    async with child("engine", command, log_path=logs / "engine.log", env=env) as part:
        yield url, [part]


def _engine_command(config: Config, model_path: str) -> tuple[str, list[str], dict[str, str]]:
    """(base URL, command, added environment) of a server of our own. Raises ConfigError."""
    settings = config.engine
    port = port_of(settings.host, settings.port, key="engine.port")
    command, env = engine_server.command(
        model_path=model_path,
        served_name=SERVED_NAME,
        host=settings.host,
        port=port,
        config=settings,
        max_context=config.rollout.max_context,
        dtype=config.model.dtype,
        seed=config.seed,
    )
    return f"http://{settings.host}:{port}", command, env


async def engine_ready(url: str, settings: EngineConfig, parts: Sequence[Child]) -> None:
    """Wait until it serves; from then on it is started again when it dies. Raises EngineError with its log's end."""
    await engine_server.wait_ready(
        url,
        poll=parts[0].poll if parts else lambda: None,
        log=partial(parts[0].log_tail, num_lines=2000, max_bytes=2**18) if parts else lambda: "",
        timeout_s=settings.start_timeout_s,
    )
    for part in parts:
        part.allow_restarts(settings.max_restarts)


def engine_client(url: str, config: Config, parts: Sequence[Child]) -> VLLMEngine:
    """A client of a server that is ready; a server that was not started here names its model itself."""
    settings = config.engine
    bound = settings.parity_bound
    return VLLMEngine(
        url,
        model=SERVED_NAME if parts else None,
        request_timeout_s=settings.request_timeout_s,
        update_timeout_s=settings.update_timeout_s,
        return_timeout_s=settings.start_timeout_s if settings.max_restarts else 0.0,
        kv_on_update=settings.kv_on_update,
        by_folder=engine_server.transfer_of(settings) == "reload",
        parity_bound=PARITY_BOUNDS[config.model.dtype] if bound == "auto" else bound,
        parity_every=settings.parity_every,
        num_starts=lambda: sum(part.num_starts for part in parts),
    )


@asynccontextmanager
async def learner_process(
    config: Config, *, config_path: Path, orchestrator_url: str, weights_dir: Path, run_dir: Path, token: str
) -> AsyncIterator[Child]:
    """The learner, on one rank or under torch's launcher on several."""
    ranks = config.learner.num_ranks
    launcher = [sys.executable, "-m", "trainer"]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += ["--module", "trainer"]
    command = [
        *launcher,
        *("--config", str(config_path), "--orchestrator", orchestrator_url),
        *("--weights-dir", str(weights_dir), "--run-dir", str(run_dir)),
        *("--weight-transfer", engine_server.transfer_of(config.engine)),
    ]
    env = {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": str(config.learner.num_threads)}
    async with child("learner", command, log_path=run_dir / "logs" / "learner.log", env=env) as part:
        yield part


@asynccontextmanager
async def warmstart_process(
    *, config_path: Path, out: Path, sandbox_url: str, token: str, logs: Path, on_line: Callable[[str], None]
) -> AsyncIterator[Child]:
    """Makes the small model in a process of its own, so that torch's memory goes with it."""
    command = [sys.executable, "-m", "agentrl", "warmstart", str(config_path), "--out", str(out)]
    command += ["--sandbox-url", sandbox_url, "--progress-json"]
    env = {TOKEN_VARIABLE: token}
    async with child("warm start", command, log_path=logs / "warmstart.log", env=env, on_line=on_line) as part:
        yield part


@contextmanager
def weights_folder(run_dir: Path) -> Iterator[Path]:
    """Where weights lie between learner and engine: in memory where the system has /dev/shm, else in the run folder."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else run_dir
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{WEIGHTS_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what runs that were killed could not: memory that nobody owns any more."""
    for folder in parent.glob(f"{WEIGHTS_PREFIX}*"):
        owner = folder.name.removeprefix(WEIGHTS_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def replace_by_engine(config: Config) -> None:
    """Become the engine server of `config`, in the foreground: `agentrl engine`. Raises ConfigError."""
    url, command, env = _engine_command(config, config.model.path)
    sys.stderr.write(f"{engine_server.describe(config.engine)}\n{url} serves {config.model.path}\n")
    os.execvpe(command[0], command, {**os.environ, **env})
