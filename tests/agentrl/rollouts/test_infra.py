"""Whole runs in which the sandbox breaks. No reward comes of it, and the error names the sandbox."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agentrl.config import Config, SandboxConfig
from agentrl.env import make
from agentrl.errors import ErrorRateExceeded
from agentrl.supervision import child as supervise
from agentrl.supervision.child import Child, ChildDied
from agentrl.supervision.serving import free_port
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.training import launch
from sandbox.client import SandboxClient, SessionLost
from tests.agentrl.rollouts.broken_runs import (
    AsksTwice,
    Known,
    assert_every_reward_is_earned,
    config_for,
    outcome,
    recorded,
)
from tests.agentrl.training.troubles import Trouble

LOST = Trouble("the sandbox service no longer knows this session")
BROKEN_SERVICE = Trouble("POST ...: HTTP 500: ...")


@asynccontextmanager
async def sandbox_process() -> AsyncIterator[tuple[SandboxClient, asyncio.subprocess.Process]]:
    """The service as a process that a test can kill."""
    port = free_port()
    command = [sys.executable, "-m", "sandbox", "--port", str(port), "--token-env", "TOKEN", "--slots", "2"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "TOKEN": "t"}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with SandboxClient(f"http://127.0.0.1:{port}", token="t") as client:
            async with asyncio.timeout(60):
                while not await _answers(client):
                    await asyncio.sleep(0.1)
            yield client, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(client: SandboxClient) -> bool:
    try:
        await client.health()
    except Exception:
        return False
    return True


@asynccontextmanager
async def supervised_sandbox(config: Config, logs: Path) -> AsyncIterator[tuple[SandboxClient, Child]]:
    """The service as a run starts it: watched, and started again."""
    async with launch.sandbox_service(config, logs=logs, token="t") as (client, parts):
        await launch.sandbox_ready(client, parts, max_restarts=config.sandbox.max_restarts)
        async with launch.watching(*parts):
            yield client, parts[0]


def kill_service(part: Child) -> None:
    """SIGKILL to the service below its guard."""
    children = Path(f"/proc/{part.process.pid}/task/{part.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


async def test_a_sandbox_that_is_killed_is_started_again_and_its_episodes_are_played_again(
    tmp_path: Path, tokenizer: TurnTokenizer
) -> None:
    # With max_lag 0 a step can only be made of the very groups that the kill hits.
    config = config_for(tmp_path, steps=6, max_retries=8, max_lag=0)
    async with supervised_sandbox(config, tmp_path) as (client, part):
        killing, session = partial(kill_service, part), await client.session()
        make_env = partial(make, Known, sandbox=client)
        assert await outcome(config, tokenizer, Known, killing, solver=AsksTwice, make_env=make_env) is None
        assert part.num_starts == 2
        with pytest.raises(SessionLost) as found:
            await session.exec("print(1)")
    assert LOST.is_in(found.value)
    assert sum(trajectory.info.get("retries", 0) for trajectory in recorded(config)) >= 1
    assert_every_reward_is_earned(config)


async def test_a_sandbox_that_cannot_be_started_again_ends_the_run_by_name(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service dies once more than it may."""
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)
    config = config_for(tmp_path, max_retries=2).model_copy(update={"sandbox": SandboxConfig(max_restarts=1)})

    async def killing(part: Child) -> None:
        while True:
            with suppress(OSError, IndexError):  # between its death and its next start
                kill_service(part)
            await asyncio.sleep(0.05)

    with pytest.raises(ChildDied, match=r"(?s)the sandbox process ended .*SIGKILL.*started 2 times.*sandbox\.log"):
        async with supervised_sandbox(config, tmp_path) as (client, part):
            begun = asyncio.Event()
            killer = asyncio.create_task(_after(begun, killing(part)))
            try:
                await outcome(config, tokenizer, Known, begun.set, make_env=partial(make, Known, sandbox=client))
            finally:
                killer.cancel()
    assert_every_reward_is_earned(config)


async def _after(begun: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    await begun.wait()
    await work


async def test_a_sandbox_that_is_killed_for_good_ends_the_run(
    tmp_path: Path, tokenizer: TurnTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.client.BACKOFF_S", 0.01)
    config = config_for(tmp_path)
    async with sandbox_process() as (client, process):
        error = await outcome(config, tokenizer, Known, process.kill, make_env=partial(make, Known, sandbox=client))
    assert isinstance(error, ErrorRateExceeded)
    assert re.search(r"6 of the last \d+ groups failed .* The first failure: tool python: Sandbox", str(error))
    assert_every_reward_is_earned(config)


@asynccontextmanager
async def sick_sandbox() -> AsyncIterator[tuple[SandboxClient, threading.Event]]:
    """A proxy before a real sandbox that answers 500 once the event is set."""
    sick = threading.Event()
    async with SandboxClient.embedded(slots=2) as client, ClientSession() as http:

        async def forward(request: web.Request) -> web.Response:
            if sick.is_set():
                return web.Response(status=500, text="out of disk")
            body, headers = await request.read(), client._headers
            async with http.request(request.method, client.url + request.path, data=body, headers=headers) as reply:
                return web.Response(status=reply.status, body=await reply.read())

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with SandboxClient(f"http://127.0.0.1:{port}") as before:
                yield before, sick
        finally:
            await runner.cleanup()


async def test_a_sandbox_that_answers_500_ends_the_run(tmp_path: Path, tokenizer: TurnTokenizer) -> None:
    config = config_for(tmp_path)
    async with sick_sandbox() as (client, sick):
        error = await outcome(config, tokenizer, Known, sick.set, make_env=partial(make, Known, sandbox=client))
    assert isinstance(error, ErrorRateExceeded)
    assert "tool python: SandboxUnavailable" in str(error)
    assert BROKEN_SERVICE.is_in(error) and "HTTP 500: out of disk" in str(error)
    assert_every_reward_is_earned(config)
