"""What all runs share: one sandbox, one engine, the model that they begin with. Independent of arms and clocks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil

from agentrl import config as config_module
from agentrl.chat.runners import TokenRunners
from agentrl.config import Config
from agentrl.data.source import held_out_tasks
from agentrl.engine import launch_servers
from agentrl.env import Env, load_env_class, opened
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.settings import settings_of
from agentrl.supervision.child import Child
from agentrl.supervision.secrets import Secrets
from agentrl.tokens.tokenizer import load_tokenizer
from agentrl.training import launch
from agentrl.training.model_folder import is_model_folder
from agentrl.types import Task
from benchmarks.asynchrony.arms import Value
from benchmarks.reporting import ROOT

if TYPE_CHECKING:
    from agentrl.engine.base import Engine, TrainableEngine
    from agentrl.tokens.tokenizer import TurnTokenizer
    from sandbox.client import SandboxClient

EVERY_CORE = frozenset(range(os.cpu_count() or 1))
WAITING = "benchmarks.asynchrony.waits:WaitingModMath"
COMMON: Mapping[str, Value] = {
    "env.target": WAITING,
    "rollout.episode_timeout_s": 3600,  # of real seconds; the longest wait is far below
    "rollout.canary_every": 0,
    "engine.max_num_seqs": 256,
    "sandbox.slots": 640,
    "learner.checkpoint_every": 0,
    "learner.save_every": 0,
    "eval.every": 0,
    "metrics.sinks": "[]",
}
"""Of every run: nothing but rollouts, steps and weights is on the clock, and no limit on concurrency binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The parts of a run that are started once."""

    config: Config
    sandbox: SandboxClient
    engine: TrainableEngine
    engine_part: Child
    tokenizer: TurnTokenizer
    held_out: Sequence[Task]
    held_out_player: GroupPlayer[Engine]
    """Plays without waits."""
    weights: Path
    """For copies of versions, in memory."""


def configured(path: Path, model: str | None, settings: Mapping[str, Value]) -> Config:
    """The config at `path` with these keys. Raises ConfigError."""
    all_settings = {**COMMON, **settings, **({"model.path": model} if model else {})}
    return config_module.load(path, [f"{key}={_yaml(value)}" for key, value in all_settings.items()])


def _yaml(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def staged(path: Path, model: str | None) -> AsyncIterator[Stage]:
    """Start sandbox and engine; the small model is made where it is missing. Raises AgentRLError."""
    config = configured(path, model, {})
    with TemporaryDirectory(prefix="asynchrony-") as folder:
        logs, token = Path(folder), Secrets.from_environment({}).sandbox
        async with launch.sandbox_service(config, logs=logs, token=token) as (sandbox, parts):
            await launch.sandbox_ready(sandbox, parts, max_restarts=0)
            if not is_model_folder(Path(config.model.path)):
                from trainer.warmstart.train import warmstart

                print((await warmstart(config, out=Path(config.model.path), sandbox=sandbox)).describe(), flush=True)
            async with launch_servers.engine_servers(config, model_path=config.model.path, logs=logs) as servers:
                await launch_servers.engines_ready(servers, config.engine)
                (part,) = launch_servers.parts_of(servers)
                async with (
                    launch_servers.engine_client(servers, config) as engine,
                    opened(load_env_class("ModMath-v0"), sandbox=sandbox) as make_env,
                ):
                    with launch.weights_folder(logs) as weights:
                        yield _stage(config, sandbox, engine, part, make_env, weights)


def _stage(
    config: Config,
    sandbox: SandboxClient,
    engine: TrainableEngine,
    part: Child,
    make_env: Callable[[], Env],
    weights: Path,
) -> Stage:
    tokenizer = load_tokenizer(config.model)
    env_class = load_env_class(config.env.target)
    return Stage(
        config=config,
        sandbox=sandbox,
        engine=engine,
        engine_part=part,
        tokenizer=tokenizer,
        held_out=held_out_tasks(env_class, config.env, num_tasks=config.eval.num_tasks),
        held_out_player=GroupPlayer(make_env, settings_of(config), TokenRunners(tokenizer)),
        weights=weights,
    )


def pin(pids: Sequence[int], cores: Set[int]) -> None:
    """Let these processes, with all their threads and descendants, use these cores alone. What ends meanwhile is left
    out."""
    for pid in pids:
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, cores)


def core_seconds(pid: int) -> float:
    """Processor seconds of a process and of its descendants so far, those that have ended included."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine_core_seconds() -> float:
    """Processor seconds that all programs of the machine have used, time stolen by other machines included."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


QUICKSTART = ROOT / "configs" / "quickstart.yaml"
