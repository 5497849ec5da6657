"""Starts the sandbox, the learner and the warm start as processes, or connects to a sandbox that a URL names.

Engines are started by agentrl/engine/launch_servers.py. Independent of the training loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.config import Config, SandboxConfig
from agentrl.engine import launch_servers, vllm_command
from agentrl.engine.placement import LOOPBACK, Placement
from agentrl.errors import SandboxError, raise_first
from agentrl.run_folder import RunFolder
from agentrl.supervision.child import Child, Spot, module_command, never
from agentrl.supervision.place import LocalPlace, Needs, Place
from agentrl.training import launch_ranks
from agentrl.workers.launch import WORKER_NEEDS

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

TOKEN_VARIABLE = "AGENTRL_TOKEN"
SANDBOX_START_TIMEOUT_S = 60.0
SANDBOX_RETURN_TIMEOUT_S = 60.0
WEIGHTS_PREFIX = "agentrl-weights-"


@asynccontextmanager
async def place_of(config: Config) -> AsyncIterator[Place]:
    """Where the run's parts are started: `config.place`. Raises ConfigError, MissingDependencyError."""
    if config.place == "local":
        yield LocalPlace()
        return
    from agentrl.supervision.ray_place import ray_place

    async with ray_place(config.ray) as place:
        yield place


def needs_of(config: Config) -> list[Needs]:
    """What each part that the run starts needs, with workers and engines as often as they are started.

    Raises ConfigError, MissingDependencyError without vLLM.
    """
    placement = vllm_command.placement_of(config)
    num_engines = config.eval.engines + config.engine.num_started
    return [
        learner_needs(config, placement),
        *(launch_servers.engine_needs(config.engine, index, placement) for index in range(num_engines)),
        *([sandbox_needs(config.sandbox)] if config.sandbox.url is None else []),
        *([WORKER_NEEDS] * config.rollout.workers),
    ]


@asynccontextmanager
async def watching(*parts: Child) -> AsyncIterator[None]:
    """Cancel the block and raise ChildDied when one of the parts ends while the block runs."""
    try:
        async with asyncio.TaskGroup() as watchers:
            tasks = [watchers.create_task(part.watch(), name=f"watch {part.name}") for part in parts]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise_first(errors)


@asynccontextmanager
async def sandbox_service(
    config: Config, *, logs: Path, token: str, place: Place | None = None
) -> AsyncIterator[tuple[SandboxClient, list[Child]]]:
    """The sandbox service of `config.sandbox`, started at `place`, by default this machine, unless `url` is set.

    Raises SandboxError, ConfigError.
    """
    from sandbox.client import SandboxClient

    settings = config.sandbox
    if settings.url is not None:
        async with SandboxClient(settings.url, token=token, return_timeout_s=SANDBOX_RETURN_TIMEOUT_S) as client:
            yield client, []
        return
    log_path, env = logs / "sandbox.log", {TOKEN_VARIABLE: token}
    patience_s = SANDBOX_RETURN_TIMEOUT_S if settings.max_restarts else 0.0
    async with (
        (place or LocalPlace()).child(
            "sandbox",
            partial(_sandbox_command, settings),
            log_path=log_path,
            needs=sandbox_needs(settings),
            env=env,
            may_end=never,
        ) as part,
        SandboxClient(lambda: part.spot.url, token=token, return_timeout_s=patience_s) as client,
    ):
        yield client, [part]


def sandbox_needs(settings: SandboxConfig) -> Needs:
    """What the sandbox service needs, where the run starts it."""
    bundle = {"CPU": 1.0, "sandbox": 1.0}
    return Needs(part="sandbox", bundle=bundle, host=settings.host, port=settings.port, port_key="sandbox.port")


def _sandbox_command(settings: SandboxConfig, spot: Spot) -> list[str]:
    return [
        *(*module_command("sandbox"), "--host", spot.host, "--port", str(spot.port)),
        *("--backend", settings.backend, "--slots", str(settings.slots), "--token-env", TOKEN_VARIABLE),
        *("--memory-bytes", str(settings.memory_bytes), *(["--allow-unsafe"] if settings.allow_unsafe else [])),
    ]


async def sandbox_ready(client: SandboxClient, parts: Sequence[Child], *, max_restarts: int) -> None:
    """Wait until the sandbox answers; from then on a sandbox that was started here is restarted when it dies.

    A restarted one keeps its port and token but not its sessions; their episodes are played again. Raises ChildDied or
    SandboxError with the end of its log.
    """
    from sandbox.client import SandboxUnavailable

    try:
        async with watching(*parts), asyncio.timeout(SANDBOX_START_TIMEOUT_S):
            while True:
                try:
                    await client.health()
                    break
                except SandboxUnavailable:
                    await asyncio.sleep(0.05)
    except TimeoutError as error:
        tails = "\n".join(part.log_tail() for part in parts)
        raise SandboxError(f"the sandbox did not answer within {SANDBOX_START_TIMEOUT_S:g} s.\n{tails}") from error
    for part in parts:
        part.allow_restarts(max_restarts)


@asynccontextmanager
async def learner_process(
    config: Config,
    *,
    config_path: Path,
    orchestrator_url: str,
    weights_dir: Path,
    run_dir: Path,
    token: str,
    may_end: Callable[[], bool] = lambda: True,
    place: Place | None = None,
) -> AsyncIterator[Child]:
    """The learner, on one rank or several, at `place`, by default this machine; see `child` for `may_end`.

    Raises ConfigError, MissingDependencyError.
    """
    many = config.learner.hostfile is not None
    with launch_ranks.token_file(run_dir, token) if many else nullcontext() as token_file:
        start = partial(
            learner_command,
            config,
            config_path=config_path,
            orchestrator_url=orchestrator_url,
            weights_dir=weights_dir,
            run_dir=run_dir,
            token_file=token_file,
        )
        needs = learner_needs(config, vllm_command.placement_of(config))
        env = {TOKEN_VARIABLE: token, **learner_environment(config)}
        log_path = run_dir / "logs" / "learner.log"
        async with (place or LocalPlace()).child(
            "learner", lambda spot: start(spot=spot), log_path=log_path, needs=needs, env=env, may_end=may_end
        ) as part:
            yield part


def learner_needs(config: Config, placement: Placement) -> Needs:
    """What the learner needs on each of its machines: a CPU for each rank, and a GPU where they run on GPUs."""
    nodes = num_nodes(config)
    each = float(config.learner.num_ranks // nodes)
    gpus = {"GPU": each} if placement.device == "cuda" else {}
    return Needs(part="learner", bundle={"CPU": each, **gpus}, machines=nodes)


def num_nodes(config: Config) -> int:
    """Nodes of the learner that Ray starts; 1 otherwise."""
    return config.learner.num_ranks // (config.ray.ranks_per_node or config.learner.num_ranks)


def learner_environment(config: Config) -> dict[str, str]:
    """The variables that the learner's ranks need, except the token: their CPU threads and their GPUs."""
    threads = {"OMP_NUM_THREADS": str(config.learner.num_threads or 1)}
    return threads | vllm_command.placement_of(config).learner_environment()


def learner_command(
    config: Config,
    *,
    config_path: Path,
    orchestrator_url: str,
    weights_dir: Path,
    run_dir: Path,
    token_file: Path | None = None,
    spot: Spot | None = None,
) -> list[str]:
    """The command that starts the learner, which resumes from its newest checkpoint.

    `spot` is one of its nodes, where Ray starts them. The learner reads its token from the environment, or from
    `token_file`, which ranks started by ssh need. Raises ConfigError, MissingDependencyError.
    """
    run, placement = RunFolder(path=run_dir), vllm_command.placement_of(config)
    return [
        *launch_ranks.launcher(config.learner, token_file=token_file, spot=spot, machines=num_nodes(config)),
        *("--config", str(config_path), "--orchestrator", orchestrator_url),
        *("--weights-dir", str(weights_dir), "--run-dir", str(run_dir)),
        *("--weight-transfer", placement.transfer, *(["--shares-gpu"] if placement.is_shared else [])),
        *(["--resume", str(run.states)] if any(run.states.glob("v*")) else []),
    ]


@asynccontextmanager
async def warmstart_process(
    *,
    config_path: Path,
    out: Path,
    sandbox_url: str,
    token: str,
    logs: Path,
    on_progress: Callable[[int, int], None],
    place: Place | None = None,
) -> AsyncIterator[Child]:
    """Makes the small model in a process of its own: agentrl does not import torch, and its memory is freed."""
    log_path = logs / "warmstart.log"
    command = [*module_command("trainer.warmstart"), str(config_path), "--out", str(out)]
    command += ["--sandbox-url", sandbox_url, "--progress-json"]
    env = {TOKEN_VARIABLE: token}
    on_line = _progress_or_log(on_progress, log_path)
    async with (place or LocalPlace()).child(
        "warm start", command, log_path=log_path, needs=Needs(part="learner"), env=env, on_line=on_line
    ) as part:
        yield part


def _progress_or_log(on_progress: Callable[[int, int], None], log_path: Path) -> Callable[[str], None]:
    """Reads `[done, total]` lines; other lines, which libraries print, go to the log."""

    def on_line(line: str) -> None:
        try:
            done, total = json.loads(line)
        except (ValueError, TypeError):
            with log_path.open("a") as log:
                log.write(line + "\n")
        else:
            on_progress(done, total)

    return on_line


@contextmanager
def weights_folder(run_dir: Path, *, urls: Sequence[str] = ()) -> Iterator[Path]:
    """A folder for the weights between learner and engine: in memory where the system has /dev/shm, else on disk.

    On disk means in the run folder. Where one of the engines' `urls` is on another machine, the folder is on disk too,
    and all machines must share it.
    """
    memory = Path("/dev/shm")
    is_near = all(urlsplit(url).hostname in LOOPBACK for url in urls)
    parent = memory if memory.is_dir() and is_near else run_dir.resolve()
    _remove_orphans(parent)
    path = Path(tempfile.mkdtemp(prefix=f"{WEIGHTS_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_orphans(parent: Path) -> None:
    """Remove the folders of runs that were killed: they hold memory that no process owns any more."""
    for folder in parent.glob(f"{WEIGHTS_PREFIX}*"):
        owner = folder.name.removeprefix(WEIGHTS_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
