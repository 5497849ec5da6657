"""The HTTP routes between orchestrator and rollout workers: who may call them, what they take, and the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentrl.errors import ConfigError, RunOver, WorkerExpired
from agentrl.supervision.loop_thread import LoopPulse
from agentrl.supervision.serving import free_port, serving
from agentrl.testing import ScriptedEngine, one_token_group
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task
from agentrl.workers import api, client, dispatcher, records
from agentrl.workers.client import OrchestratorGone, OrchestratorLink
from agentrl.workers.dispatcher import Dispatcher
from agentrl.workers.leases import Limits
from agentrl.workers.records import Play, Report, Result, RunInfo
from tests.agentrl.workers.test_dispatcher import Engines

TOKEN = "secret"
INFO = RunInfo(config={"name": "t", "seed": 3}, model_path="models/tiny", sandbox_url="http://127.0.0.1:1")


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[Dispatcher, OrchestratorLink]]:
    settings = {"max_episodes": 8, "timeout_s": 60.0, "max_attempts": 2, **limits}
    found = Dispatcher(Engines(), Limits(**settings), group_sizes={"train": 2, "eval": 2})
    async with (
        serving(api.create_app(found, INFO, token=TOKEN), host="127.0.0.1", port=0) as url,
        found.running(),
        OrchestratorLink(url, token=TOKEN, gone_after_s=0.5) as link,
    ):
        yield found, link


async def test_a_group_travels_to_a_worker_and_back_whole(tokenizer: TurnTokenizer) -> None:
    task = Task(id="t", prompt="?", answer="7", metadata={"level": 3, "tags": ["a", "b"]})
    group = one_token_group(4, versions=(1, 2), rewards=(0.25, 1 / 3), task=task)
    async with served() as (found, link):
        assert await link.run_info() == INFO
        lease = await link.join("w")
        engine = ScriptedEngine(tokenizer=tokenizer, script=[])
        playing = asyncio.create_task(found.play_group(engine, 4, task, kind="train"))
        await asyncio.sleep(0)
        orders = await link.orders(Report(lease=lease))
        assert orders.engines == found.engine_states
        (assignment,) = orders.assignments
        assert assignment.task == task and assignment.play == Play(kind="train", group_id=4, number=0)
        for _ in range(2):
            await link.result(Result(lease=lease, play=assignment.play, group=group))
        assert await playing == group


async def test_a_worker_is_told_where_the_sandbox_is_now() -> None:
    addresses = ["http://127.0.0.1:2"]
    found = Dispatcher(Engines(), Limits(max_episodes=8, timeout_s=60, max_attempts=2), group_sizes={"train": 2})
    app = api.create_app(found, INFO, token=TOKEN, sandbox_url=lambda: addresses[-1])
    async with (
        serving(app, host="127.0.0.1", port=0) as url,
        found.running(),
        OrchestratorLink(url, token=TOKEN, gone_after_s=0.5) as link,
    ):
        assert (await link.run_info()).sandbox_url == addresses[-1]
        lease = await link.join("w")
        addresses.append("http://127.0.0.1:3")
        assert (await link.orders(Report(lease=lease))).sandbox_url == "http://127.0.0.1:3"


async def test_calls_without_the_token_or_with_a_wrong_body_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_BODY_BYTES", 200)
    async with served() as (_, link), httpx.AsyncClient(base_url=link.url) as http:
        for path in (
            records.JOIN,
            records.ORDERS,
            records.ALIVE,
            records.RESULT,
            records.ENGINE_FAILURE,
            records.LEAVE,
        ):
            assert (await http.post(path, content=b"x")).status_code == 401
            http.headers["authorization"] = f"Bearer {TOKEN}"
            assert (await http.post(path, content=b"x")).status_code == 422
            assert (await http.post(path, content=b"x" * 201)).status_code == 413
            del http.headers["authorization"]
        assert (await http.get(records.RUN)).status_code == 401
        async with OrchestratorLink(link.url, token="other") as stranger:
            with pytest.raises(ConfigError, match="need one AGENTRL_TOKEN"):
                await stranger.run_info()


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="set AGENTRL_TOKEN"):
        api.create_app(
            Dispatcher(Engines(), Limits(max_episodes=1, timeout_s=1, max_attempts=1), group_sizes={}), INFO, token=""
        )


async def test_a_worker_that_was_given_up_and_one_whose_run_is_over_are_told_apart() -> None:
    async with served() as (found, link):
        with pytest.raises(WorkerExpired, match="join again"):
            await link.orders(Report(lease="of a run that ended"))
        lease = await link.join("w")
        await link.leave(lease, "a test")
        assert found.names == []
        lease = await link.join("w")
        revision = (await link.orders(Report(lease=lease))).revision
        parked = asyncio.create_task(link.orders(Report(lease=lease, revision=revision)))
        await asyncio.sleep(0.1)
        found.end()
        with pytest.raises(RunOver):
            await parked


async def test_a_worker_whose_connection_breaks_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "DISCONNECTED_S", 0.1)
    monkeypatch.setattr(dispatcher, "PARK_S", 30.0)
    async with served() as (found, link):
        lease = await link.join("w")
        revision = (await link.orders(Report(lease=lease))).revision
        parked = asyncio.create_task(link.orders(Report(lease=lease, revision=revision)))
        await asyncio.sleep(0.3)
        assert found.names == ["w"]
        parked.cancel()  # closes its connection, as the end of the process does
        async with asyncio.timeout(5):
            while found.names:
                await asyncio.sleep(0.05)


async def test_signs_of_life_come_while_episodes_move_though_the_event_loop_is_in_one_long_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ALIVE_EVERY_S", 0.01)
    seen: list[str] = []

    async def episode(number: int) -> None:
        """Computes until the orchestrator has heard of it."""
        until = time.monotonic() + 20
        while len(seen) <= number and time.monotonic() < until:
            time.sleep(0.01)

    async def worker(url: str) -> None:
        pulse = LoopPulse(asyncio.get_running_loop())
        async with OrchestratorLink(url, token=TOKEN) as link, link.signs_of_life("5f3c", pulse.moved):
            await asyncio.gather(*(episode(number) for number in range(3)))

    async with served() as (found, link):
        monkeypatch.setattr(found, "alive", seen.append)
        await asyncio.to_thread(asyncio.run, worker(link.url))
    assert seen == ["5f3c"] * 3, "one for each task that was seen to run: one that blocks gives no second"


async def test_an_orchestrator_that_does_not_return_ends_the_worker() -> None:
    async with OrchestratorLink(f"http://127.0.0.1:{free_port()}", token=TOKEN, gone_after_s=0.2) as link:
        with pytest.raises(OrchestratorGone, match="is gone"):
            await link.run_info()
