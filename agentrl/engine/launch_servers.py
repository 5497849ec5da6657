"""Starts a run's vLLM servers, or connects to those that URLs name, and makes the one engine client of the run.

The servers' flags are in vllm_command.py. Independent of the training loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config import Config, EngineConfig
from agentrl.engine import parity, vllm_command, vllm_server
from agentrl.engine.placement import Placement
from agentrl.engine.pool import EnginePool
from agentrl.engine.vllm_engine import VLLMEngine
from agentrl.engine.weight_updates import UpdateSettings
from agentrl.errors import raise_first
from agentrl.supervision.child import Child, child, in_foreground, never
from agentrl.supervision.serving import configured_port

SERVED_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """One vLLM server of the run. Example: `EngineServer(url="http://127.0.0.1:8000")`, started elsewhere."""

    url: str
    part: Child | None = None
    """None: not started by this run."""


def parts_of(servers: Sequence[EngineServer]) -> list[Child]:
    """The processes of the servers that were started here."""
    return [server.part for server in servers if server.part is not None]


@asynccontextmanager
async def engine_servers(
    config: Config, *, model_path: str, logs: Path, token: str | None = None, has_learner: bool = True
) -> AsyncIterator[list[EngineServer]]:
    """The servers of `config.engine`, which may still be starting: wait with `engines_ready`.

    Servers started here require `token` where it is given. Without a learner they may use all GPUs. Raises ConfigError.

    Example:
        async with engine_servers(config, model_path=path, logs=logs) as servers:
            await engines_ready(servers, config.engine)
            async with engine_client(servers, config) as engine:
                ...
    """
    settings = config.engine
    async with AsyncExitStack() as stack:
        servers = [EngineServer(url=url) for url in settings.urls]
        placement = None if servers else vllm_command.placement_of(config, has_learner=has_learner)
        for index in range(settings.replicas if placement else 0):
            url, command, env = _command(config, model_path, index, token, placement)
            name = "engine" if settings.replicas == 1 else f"engine-{index}"
            part = await stack.enter_async_context(
                child(name, command, log_path=logs / f"{name}.log", env=env, may_end=never, has_own_temporary=True)
            )
            servers.append(EngineServer(url=url, part=part))
        yield servers


def start_phase(settings: EngineConfig) -> str:
    """The name of the wait for the servers, which are started or run already. Example: "starting the engine (vLLM)"."""
    return f"connecting to {', '.join(settings.urls)}" if settings.urls else "starting the engine (vLLM)"


async def engines_ready(servers: Sequence[EngineServer], settings: EngineConfig) -> None:
    """Wait until all servers answer; from then on those started here are restarted when they die.

    Raises EngineError, with the end of its log, for the first server that does not answer.
    """
    try:
        async with asyncio.TaskGroup() as waiting:
            for server in servers:
                waiting.create_task(_ready(server, settings), name=f"start of {server.url}")
    except BaseExceptionGroup as errors:
        raise_first(errors)


async def _ready(server: EngineServer, settings: EngineConfig) -> None:
    part = server.part
    await vllm_server.wait_ready(
        server.url,
        poll=part.poll if part else lambda: None,
        log=partial(part.log_tail, num_lines=2000, max_bytes=2**18) if part else lambda: "",
        timeout_s=vllm_server.start_timeout_s(settings),
    )
    if part:
        part.allow_restarts(settings.max_restarts)


def engine_client(
    servers: Sequence[EngineServer],
    config: Config,
    *,
    token: str | None = None,
    on_tokens: Callable[[], None] = lambda: None,
    first_version: int = 0,
) -> VLLMEngine | EnginePool:
    """A client of servers that are ready: of the only one, or a pool of all.

    Args:
        on_tokens: called as tokens arrive.
        first_version: of the weights with which the servers were started.
    """
    settings = config.engine
    common: dict[str, Any] = {"token": token, "on_tokens": on_tokens, "first_version": first_version}
    return_timeout_s = vllm_server.start_timeout_s(settings) if settings.max_restarts else 0.0
    if len(servers) == 1:
        return vllm_client(servers[0], config, return_timeout_s=return_timeout_s, **common)
    # A pool does not wait for a server that is gone: it has others, and takes this one back itself.
    clients = [vllm_client(server, config, return_timeout_s=0.0, **common) for server in servers]
    return EnginePool(clients, order=settings.update_order, return_timeout_s=return_timeout_s)


def vllm_client(
    server: EngineServer,
    config: Config,
    *,
    return_timeout_s: float,
    token: str | None = None,
    on_tokens: Callable[[], None] = lambda: None,
    first_version: int = 0,
) -> VLLMEngine:
    """A client of one server; one that was not started here is asked for the name of its model."""
    settings, part = config.engine, server.part
    return VLLMEngine(
        server.url,
        model=SERVED_NAME if part else None,
        request_timeout_s=settings.request_timeout_s,
        updates=UpdateSettings(
            first_version=first_version,
            update_timeout_s=settings.update_timeout_s,
            return_timeout_s=return_timeout_s,
            kv_on_update=settings.kv_on_update,
            sleeps=settings.sleep_while_training,
            by_folder=settings.weight_transfer == "reload",
            parity_bound=parity.mean_bound(config),
            parity_every=settings.parity_every,
        ),
        num_starts=lambda: part.num_starts if part else 0,
        end_server=part.end_all if part else None,
        on_tokens=on_tokens,
        token=token,
    )


def serve_in_foreground(config: Config, *, token: str | None = None) -> int:
    """Serve the model of `config` until the server ends: `agentrl engine`. Returns its exit code.

    Raises ConfigError, and KeyboardInterrupt when this process is asked to stop.
    """
    placement = vllm_command.placement_alone(config.engine)
    url, command, env = _command(config, config.model.path, 0, token, placement)
    sys.stderr.write(f"{vllm_command.describe(config.engine, placement)}\n{url} serves {config.model.path}\n")
    return in_foreground(command, env=env)


def _command(
    config: Config, model_path: str, index: int, token: str | None, placement: Placement | None
) -> tuple[str, list[str], dict[str, str]]:
    """(base URL, command, added environment) of the `index`-th server of this run. Raises ConfigError."""
    settings = config.engine
    port = configured_port(settings.host, settings.port and settings.port + index, key="engine.port")
    command, env = vllm_command.command(
        model_path=model_path,
        served_name=SERVED_NAME,
        host=settings.host,
        port=port,
        config=settings,
        max_context=config.rollout.max_context,
        dtype=config.model.dtype,
        seed=config.seed + index,  # engines with one seed would sample the same episodes
        token=token,
        placement=placement,
        index=index,
    )
    return f"http://{settings.host}:{port}", command, env
