"""The rollout workers of a run: serves the dispatcher to them, and starts those that the config asks for.

Independent of the training loop and of how a group is played.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentrl.config import Config
from agentrl.engine.base import SharedEngines
from agentrl.errors import InfraError
from agentrl.rollouts.settings import settings_of
from agentrl.supervision import secrets as secret_names
from agentrl.supervision.child import Child, module_command, never
from agentrl.supervision.place import LocalPlace, Needs, Place
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.serving import serving
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.workers.api import create_app
from agentrl.workers.dispatcher import Dispatcher
from agentrl.workers.leases import Limits
from agentrl.workers.records import RunInfo

START_TIMEOUT_S = 180.0
"""Until the first worker has joined."""
MAX_RESTARTS = 3
"""Restarts of a worker; each hour without a failure adds one, up to this number."""

WORKER_NEEDS = Needs(part="rollout_worker")
"""What a worker needs."""


def listen_address(config: Config, here: str = "127.0.0.1") -> tuple[str, int]:
    """Where workers connect: (host, port). Where rollout.worker_listen is not set: a free port at `here`, as 0."""
    host, _, port = (config.rollout.worker_listen or f"{here}:0").rpartition(":")
    return host.strip("[]"), int(port)


@asynccontextmanager
async def rollout_workers(
    config: Config,
    engines: SharedEngines,
    info: RunInfo,
    *,
    secrets: Secrets,
    logs: Path,
    wait_graph: WaitGraph,
    place: Place | None = None,
    sandbox_url: Callable[[], str] | None = None,
) -> AsyncIterator[tuple[Dispatcher, list[Child]]]:
    """The dispatcher of a run, and the workers that it starts at `place`, by default this machine. They may still be
    starting: wait with `workers_ready`.

    `sandbox_url` gives the sandbox's address now, where it may change. They end with the block. Raises ConfigError
    where it cannot listen.

    Example:
        async with rollout_workers(config, engine, info, secrets=secrets, logs=logs, wait_graph=graph) as found:
            dispatcher, parts = found
            await workers_ready(dispatcher, parts, graph)
            group = await dispatcher.play_group(engine, 7, task, kind="train")
    """
    rollout, place = config.rollout, place or LocalPlace()
    dispatcher = Dispatcher(
        engines,
        Limits(
            max_episodes=rollout.worker_episodes,
            timeout_s=rollout.worker_timeout_s,
            max_attempts=rollout.max_retries + 1,
        ),
        group_sizes={kind: settings.config.group_size for kind, settings in settings_of(config).items()},
        wait_graph=wait_graph,
    )
    host, port = listen_address(config, place.here)
    app = create_app(dispatcher, info, token=secrets.run, sandbox_url=sandbox_url)
    async with serving(app, host=host, port=port) as url, dispatcher.running(), AsyncExitStack() as stack:
        parts = [
            await stack.enter_async_context(_worker(index, url, secrets, logs=logs, place=place))
            for index in range(rollout.workers)
        ]
        if rollout.worker_listen:
            sys.stderr.write(f"rollout workers join at {url}\n")
        try:
            yield dispatcher, parts
        finally:
            dispatcher.end()  # before the workers are stopped: none of them is lost


async def workers_ready(dispatcher: Dispatcher, parts: Sequence[Child], wait_graph: WaitGraph) -> None:
    """Wait until a worker has joined; from then on those started here are restarted when they die.

    Raises InfraError.
    """
    waiting = wait_graph.waiting("run", on="rollout workers", what="the first", within_s=START_TIMEOUT_S)
    try:
        with waiting:
            async with asyncio.timeout(START_TIMEOUT_S):
                await dispatcher.joined()
    except TimeoutError as error:
        tails = "\n".join(part.log_tail() for part in parts[:1])
        raise InfraError(
            f"no rollout worker joined within {START_TIMEOUT_S:g} s: start `agentrl rollout-worker --orchestrator URL` "
            f"on other machines, or set rollout.workers.\n{tails}"
        ) from error
    for part in parts:
        part.allow_restarts(MAX_RESTARTS)


@asynccontextmanager
async def _worker(index: int, url: str, secrets: Secrets, *, logs: Path, place: Place) -> AsyncIterator[Child]:
    name = f"rollout-worker-{index}"
    command = [*module_command("agentrl"), "rollout-worker", "--orchestrator", url, "--name", name]
    command += ["--stacks", str(logs / f"{name}-stacks.txt")]
    env = {secret_names.RUN: secrets.run, secret_names.SANDBOX: secrets.sandbox}
    env |= {secret_names.ENGINE: secrets.engine} if secrets.engine else {}
    log_path = logs / f"{name}.log"
    async with place.child(name, command, log_path=log_path, needs=WORKER_NEEDS, env=env, may_end=never) as part:
        yield part
