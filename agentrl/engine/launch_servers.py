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
from agentrl.supervision.child import Child, Spot, never
from agentrl.supervision.place import LocalPlace, Needs, Place
from agentrl.supervision.process_tree import in_foreground
from agentrl.supervision.serving import configured_port

SERVED_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """One vLLM server of the run. Example: `EngineServer(url="http://127.0.0.1:8000")`, started elsewhere."""

    url: str
    part: Child | None = None
    """None: not started by this run."""

    def address(self) -> str:
        """Where it is now: one that this run started may be elsewhere after a restart."""
        return self.part.spot.url if self.part else self.url


def parts_of(servers: Sequence[EngineServer]) -> list[Child]:
    """The processes of the servers that were started here."""
    return [server.part for server in servers if server.part is not None]


@asynccontextmanager
async def engine_servers(
    config: Config,
    *,
    model_path: str,
    logs: Path,
    token: str | None = None,
    has_learner: bool = True,
    is_spare: bool = False,
    place: Place | None = None,
) -> AsyncIterator[list[EngineServer]]:
    """The servers of `config.engine`, which may still be starting: wait with `engines_ready`. `is_spare`: those of
    `eval.engines` instead.

    Servers started at `place`, by default on this machine, require `token` where it is given. Without a learner they
    may use all GPUs. Raises ConfigError.

    Example:
        async with engine_servers(config, model_path=path, logs=logs) as servers:
            await engines_ready(servers, config.engine)
            async with engine_client(servers, config) as engine:
                ...
    """
    settings = config.engine
    if settings.urls and not is_spare:
        yield [EngineServer(url=url) for url in settings.urls]
        return
    if not (indexes := _indexes(config, is_spare=is_spare)):
        yield []
        return
    placement = vllm_command.placement_of(config, has_learner=has_learner)
    servers = []
    async with AsyncExitStack() as stack:
        for index, name in indexes.items():
            serve = partial(_command, config, model_path, index, token, placement)
            part = await stack.enter_async_context(
                (place or LocalPlace()).child(
                    name,
                    partial(_argv, serve),
                    log_path=logs / f"{name}.log",
                    needs=engine_needs(settings, index, placement),
                    env=serve(Spot(host=settings.host))[1],
                    may_end=never,
                    has_own_temporary=True,
                )
            )
            servers.append(EngineServer(url=part.spot.url, part=part))
        yield servers


def _indexes(config: Config, *, is_spare: bool) -> dict[int, str]:
    """The number of each server among all that the run starts, which decides its GPUs, and its name."""
    num_playing = config.engine.num_started
    count, first, name = (config.eval.engines, num_playing, "eval-engine") if is_spare else (num_playing, 0, "engine")
    return {first + at: name if count == 1 else f"{name}-{at}" for at in range(count)}


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
                waiting.create_task(_ready(server, settings), name=f"start of {server.address()}")
    except BaseExceptionGroup as errors:
        raise_first(errors)


async def _ready(server: EngineServer, settings: EngineConfig) -> None:
    part = server.part
    await vllm_server.wait_ready(
        server.address(),
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
        server.address,
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
    settings = config.engine
    placement = vllm_command.placement_alone(settings)
    spot = Spot(host=settings.host, port=configured_port(settings.host, settings.port, key="engine.port"))
    command, env = _command(config, config.model.path, 0, token, placement, spot)
    sys.stderr.write(f"{vllm_command.describe(settings, placement)}\n{spot.url} serves {config.model.path}\n")
    return in_foreground(command, env=env)


def engine_needs(settings: EngineConfig, index: int, placement: Placement) -> Needs:
    """What the `index`-th server needs."""
    gpus = {"GPU": float(settings.tensor_parallel)} if placement.device == "cuda" else {}
    port = settings.port and settings.port + index
    return Needs(part="engine", bundle={"CPU": 1.0, **gpus}, host=settings.host, port=port, port_key="engine.port")


def _argv(serve: Callable[[Spot], tuple[list[str], dict[str, str]]], spot: Spot) -> list[str]:
    """The arguments of the server that is started at `spot`."""
    return serve(spot)[0]


def _command(
    config: Config, model_path: str, index: int, token: str | None, placement: Placement | None, spot: Spot
) -> tuple[list[str], dict[str, str]]:
    """(command, added environment) of the `index`-th server of this run, at `spot`. Raises ConfigError."""
    return vllm_command.command(
        model_path=model_path,
        served_name=SERVED_NAME,
        host=spot.host,
        port=spot.port,
        config=config.engine,
        max_context=config.rollout.max_context,
        dtype=config.model.dtype,
        seed=config.seed + index,  # engines with one seed would sample the same episodes
        token=token,
        placement=placement,
        index=index,
    )
