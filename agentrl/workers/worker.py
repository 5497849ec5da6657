"""One rollout worker: an event loop with its own environments, tokenizer and engine client.

It joins a run, plays the groups that it is given, and sends them back whole. After it was given up, e.g. when its
network was gone for a while, it drops what it played and joins again. Independent of journal, batches and learner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.chat.runners import TokenRunners
from agentrl.config import Config, parse
from agentrl.engine.base import Engine
from agentrl.engine.followed import EngineStates, FollowedEngines
from agentrl.engine.placement import LOOPBACK
from agentrl.engine.vllm_server import start_timeout_s
from agentrl.errors import AgentRLError, ConfigError, EngineError, RunOver, RunStalled, WorkerExpired, raise_first
from agentrl.rollouts.group import GroupPlayer
from agentrl.rollouts.monitored_env import monitored
from agentrl.rollouts.set_envs import load_envs, opened_envs, players_of
from agentrl.supervision.loop_thread import LoopPulse
from agentrl.supervision.secrets import Secrets
from agentrl.supervision.serving import free_port
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.supervision.watchdog import Patience, watched
from agentrl.tokens.tokenizer import load_tokenizer
from agentrl.workers.client import OrchestratorGone, OrchestratorLink
from agentrl.workers.records import Assignment, EngineFailure, Orders, Play, PlayError, Report, Result

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

LATENESS_EVERY_S = 0.1


async def work(url: str, secrets: Secrets, *, name: str, stacks: Path) -> None:
    """Play for the orchestrator at `url` until its run is over.

    Args:
        name: of this worker; unique in the run.
        stacks: file for the stacks of all threads where code blocks the event loop.

    Raises OrchestratorGone, RunStalled where one call of environment code blocks the event loop for half of
    rollout.worker_timeout_s, ConfigError, EnvError.

    Example:
        await work("http://node-1:8401", Secrets.from_environment(os.environ), name="node-2", stacks=Path("stacks.txt"))
    """
    async with OrchestratorLink(url, token=secrets.run) as link:
        while True:
            try:
                await _join_and_play(link, secrets, name=name, stacks=stacks)
            except WorkerExpired as error:
                log.warning("%s", error)
            except RunOver:
                return


async def _join_and_play(link: OrchestratorLink, secrets: Secrets, *, name: str, stacks: Path) -> None:
    info = await link.run_info()
    config = parse(info.config, source=f"the config of the orchestrator at {link.url}")
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model, info.model_path)
    envs = load_envs(config)
    wait_graph = WaitGraph()
    patience = Patience(stall_s=math.inf, loop_s=config.rollout.worker_timeout_s / 2)
    async with (
        joined_sandbox(address := SandboxAddress(info.sandbox_url, link.url), secrets) as sandbox,
        opened_envs(envs, sandbox=sandbox) as make_envs,
    ):
        watched_envs = {of: monitored(make_env, wait_graph) for of, make_env in make_envs.items()}
        players = players_of(envs, watched_envs, TokenRunners(tokenizer))
        lease = await link.join(name)
        worker = RolloutWorker(link, players, lease=lease, wait_graph=wait_graph, sandbox_moved=address.follow)
        reason = "it was stopped"
        try:
            async with (
                watched(wait_graph, patience, dump=stacks),
                worker.engines(config, secrets.engine),
                link.signs_of_life(lease, LoopPulse(asyncio.get_running_loop()).moved),
            ):
                await worker.run()
        except RunStalled as error:
            reason = str(error)
            raise
        except AgentRLError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            await link.leave(lease, reason)


@asynccontextmanager
async def joined_sandbox(address: SandboxAddress, secrets: Secrets) -> AsyncIterator[SandboxClient]:
    """A client of the sandbox of the run that was joined, wherever it is then."""
    from sandbox.client import SandboxClient

    async with SandboxClient(lambda: address.url, token=secrets.sandbox, return_timeout_s=60.0) as client:
        yield client


class SandboxAddress:
    """Where the sandbox of the run is. On a Ray cluster it has another address after a restart.

    Raises ConfigError for an address that cannot be reached from here.

    Example:
        address = SandboxAddress("http://10.0.0.5:8321", "http://10.0.0.1:8401")
        address.follow("http://10.0.0.6:8321")
    """

    def __init__(self, url: str, orchestrator_url: str) -> None:
        self._orchestrator_url = orchestrator_url
        self.url = ""
        self.follow(url)

    def follow(self, url: str) -> None:
        """It is there now. Raises ConfigError."""
        if url != self.url:
            _check_reachable(url, self._orchestrator_url, part="sandbox", key="sandbox.url")
            self.url = url


def _check_reachable(url: str, orchestrator_url: str, *, part: str, key: str) -> None:
    """Raises ConfigError for a part that listens on the loopback of the orchestrator's machine, not of this one."""
    if urlsplit(url).hostname in LOOPBACK and not _is_here(urlsplit(orchestrator_url).hostname or ""):
        raise ConfigError(
            f"the {part} of the run is at {url}, which this worker cannot reach from another machine: set {key} to an "
            "address in your network"
        )


def _is_here(host: str) -> bool:
    with suppress(OSError):
        return host in LOOPBACK or free_port(host) > 0
    return False


class RolloutWorker:
    """A worker that has joined.

    Args:
        players: play the groups, by the name of the held-out set; "" trains.
        lease: from the orchestrator.
        wait_graph: of this process; its movements are reported.
        sandbox_moved: called with the address of the sandbox.

    Example:
        async with worker.engines(config, token):
            await worker.run()
    """

    def __init__(
        self,
        link: OrchestratorLink,
        players: Mapping[str, GroupPlayer[Engine]],
        *,
        lease: str,
        wait_graph: WaitGraph,
        sandbox_moved: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._link = link
        self._players = players
        self._lease = lease
        self._wait_graph = wait_graph
        self._sandbox_moved = sandbox_moved
        self._states = EngineStates()
        self._engine: FollowedEngines
        self._spare: FollowedEngines  # those that only evaluate
        self._playing: dict[Play, asyncio.Task[None]] = {}
        self._revision = -1
        self._late_s = 0.0

    @asynccontextmanager
    async def engines(self, config: Config, token: str | None) -> AsyncIterator[None]:
        """The clients of the run's engines, while the block runs."""
        client = partial(
            FollowedEngines,
            self._states,
            self._engine_failed,
            request_timeout_s=config.engine.request_timeout_s,
            return_timeout_s=start_timeout_s(config.engine) if config.engine.max_restarts else 0.0,
            token=token,
            on_tokens=lambda: self._wait_graph.beat("engine"),
        )
        async with client() as self._engine, client(is_spare=True) as self._spare:
            yield

    async def run(self) -> None:
        """Follow orders. Raises WorkerExpired, RunOver, OrchestratorGone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure_lateness(), name="lateness")
                while True:
                    orders = await self._link.orders(self._report())
                    self._follow(orders, tasks)
        except BaseExceptionGroup as errors:
            raise_first(errors)

    def _follow(self, orders: Orders, tasks: asyncio.TaskGroup) -> None:
        if orders.revision != self._revision:
            self._states.apply(orders.engines)
            for state in orders.engines:
                key = "engine.host" if state.is_spare else "engine.url"
                _check_reachable(state.url, self._link.url, part="engine", key=key)
        self._revision = orders.revision
        if orders.sandbox_url is not None:
            self._sandbox_moved(orders.sandbox_url)
        for play in orders.cancelled:
            if (task := self._playing.pop(play, None)) is not None:
                task.cancel()
        for assignment in orders.assignments:
            play = assignment.play
            if play not in self._playing:
                name = f"group {play.kind}-{play.group_id}"
                self._playing[play] = tasks.create_task(self._one_group(assignment), name=name)

    def _report(self) -> Report:
        late_s, self._late_s = self._late_s, 0.0
        return Report(
            lease=self._lease,
            revision=self._revision,
            held=tuple(self._playing),
            num_tokens=self._engine.num_tokens,
            num_beats=self._wait_graph.snapshot().num_beats,
            is_generating=self._engine.num_running > 0,
            late_s=late_s,
        )

    async def _one_group(self, assignment: Assignment) -> None:
        play, result = assignment.play, None
        try:
            engine = (self._spare if play.is_spare else self._engine).named(f"{self._lease[:12]}.{play.number}")
            player = self._players[play.set_name]
            group = await player.play_group(engine, play.group_id, assignment.task, kind=play.kind)
            result = Result(lease=self._lease, play=play, group=group)
        except OrchestratorGone:
            raise
        except Exception as error:
            if not isinstance(error, AgentRLError):
                log.exception("group %d (task %s)", play.group_id, assignment.task.id)
            result = Result(lease=self._lease, play=play, error=PlayError.of(error))
        try:
            await self._send(result)
        finally:
            if self._playing.get(play) is asyncio.current_task():
                del self._playing[play]

    async def _send(self, result: Result) -> None:
        try:
            await self._link.result(result)
        except ConfigError as error:  # of this group alone: it does not fit
            await self._link.result(Result(lease=self._lease, play=result.play, error=PlayError.of(error)))

    async def _engine_failed(self, index: int, num_checks: int, error: EngineError) -> None:
        await self._link.engine_failed(
            EngineFailure(lease=self._lease, index=index, num_checks=num_checks, message=str(error)[:500])
        )

    async def _measure_lateness(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LATENESS_EVERY_S)
            self._late_s = max(self._late_s, time.monotonic() - began - LATENESS_EVERY_S)
