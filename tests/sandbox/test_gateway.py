"""Several services behind one gateway: a session stays where it was opened, and a lost replica is reported as lost."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from sandbox import gateway
from sandbox.client import SandboxClient, SessionLost
from tests.sandbox.conftest import Service, start_service, stop_service

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass(kw_only=True)
class Replicas:
    """Two services on one port, and which of them the name resolves to."""

    services: dict[str, Service]
    port: int
    known: Sequence[str]

    async def resolve(self) -> Sequence[str]:
        return self.known


def port_free_on_both() -> int:
    with socket.socket() as one, socket.socket() as two:
        one.bind((ADDRESSES[0], 0))
        port = int(one.getsockname()[1])
        two.bind((ADDRESSES[1], port))
    return port


@contextmanager
def running() -> Iterator[Replicas]:
    port = port_free_on_both()
    flags = (
        "--backend",
        "unsafe",
        "--allow-unsafe",
        "--slots",
        "1",
        "--warm",
        "1",
        "--preload",
        "",
        "--port",
        str(port),
    )
    services = {address: start_service(*flags, "--host", address) for address in ADDRESSES}
    try:
        yield Replicas(services=services, port=port, known=ADDRESSES)
    finally:
        for service in services.values():
            if service.process.poll() is None:
                stop_service(service)


@pytest.fixture(scope="module")
def both() -> Iterator[Replicas]:
    with running() as replicas:
        yield replicas


@pytest.fixture
def replicas(both: Replicas) -> Iterator[Replicas]:
    """For tests that leave the services as they are."""
    yield both
    both.known = ADDRESSES


@asynccontextmanager
async def gateway_of(replicas: Replicas) -> AsyncIterator[str]:
    runner = web.AppRunner(gateway.Gateway(replicas.resolve, replicas.port).app(), handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def client(replicas: Replicas) -> AsyncIterator[SandboxClient]:
    async with gateway_of(replicas) as url, SandboxClient(url) as client:
        yield client


async def test_sessions_are_spread_and_each_keeps_its_variables(client: SandboxClient, replicas: Replicas) -> None:
    sessions = [await client.open_session() for _ in range(12)]
    for number, session in enumerate(sessions):
        await session.exec(f"x = {number}")
    assert [(await session.exec("x")).result for session in sessions] == [str(number) for number in range(12)]
    await sessions[0].put_file("name", b"\0\xff")
    assert await sessions[0].get_file("name") == b"\0\xff"
    shares = []
    for address in ADDRESSES:
        async with SandboxClient(f"http://{address}:{replicas.port}") as replica:
            shares.append((await replica.health()).sessions)
    assert sum(shares) == 12 and min(shares) > 0
    health = await client.health()
    assert (health.sessions, health.slots) == (12, 2)
    for session in sessions:
        await session.close()
    assert (await client.health()).sessions == 0


async def test_an_opening_that_is_repeated_opens_one_session(client: SandboxClient) -> None:
    body = {"idempotency_key": uuid.uuid4().hex}
    async with aiohttp.ClientSession() as http:
        ids = set()
        for _ in range(6):
            async with http.post(f"{client.url}/v1/sessions", json=body) as answer:
                ids.add((await answer.json())["session_id"])
    assert len(ids) == 1


async def test_a_lost_replica_loses_its_sessions_and_no_others() -> None:
    with running() as replicas:
        async with gateway_of(replicas) as url, SandboxClient(url) as client:
            sessions = [await client.open_session() for _ in range(12)]
            replicas.services[ADDRESSES[1]].process.send_signal(signal.SIGKILL)
            for _ in range(4):  # a new session goes to a replica that answers
                assert (await (await client.open_session()).exec("2")).result == "2"
            replicas.known = ADDRESSES[:1]  # Docker's resolver forgets a container that is gone
            outcomes = await asyncio.gather(*(session.exec("1") for session in sessions), return_exceptions=True)
    lost = [outcome for outcome in outcomes if isinstance(outcome, SessionLost)]
    assert 0 < len(lost) < 12
    assert {outcome.result for outcome in outcomes if not isinstance(outcome, BaseException)} == {"1"}


async def test_a_client_that_goes_away_ends_what_it_asked_for(client: SandboxClient) -> None:
    session = await client.open_session()
    endless = asyncio.create_task(session.exec("while True: pass", timeout_s=60))
    while (await client.health()).running == 0:
        await asyncio.sleep(0.02)
    endless.cancel()
    async with asyncio.timeout(10):
        while (await client.health()).running:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("session_id", ["none", "abc.", "abc.zz", "abc.0a000001", "abc%2F..%2Fx.zz"])
async def test_no_session_id_leads_anywhere_else(client: SandboxClient, session_id: str) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.delete(URL(f"{client.url}/v1/sessions/{session_id}", encoded=True)) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]) == (404, "session_lost")


async def test_a_single_replica_s_metrics_are_passed_on_several_are_not(replicas: Replicas) -> None:
    async with gateway_of(replicas) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/metrics") as answer:
            assert answer.status == 404
        replicas.known = ADDRESSES[:1]
        async with http.get(f"{url}/metrics") as answer:
            assert "sandbox_sessions" in await answer.text()


@pytest.mark.parametrize(("body", "status"), [(b"[" * 60_000, 422), (b" " * 70_000, 413)])
async def test_the_body_that_opens_a_session_is_small_and_flat(client: SandboxClient, body: bytes, status: int) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{client.url}/v1/sessions", data=body) as answer:
        assert (answer.status, "error" in await answer.json()) == (status, True)


def test_it_opens_no_service_to_others_that_may_demand_no_token() -> None:
    command = [sys.executable, "-m", "sandbox.gateway", "--host", "0.0.0.0", "--to", "localhost:8321"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "may demand no token" in done.stderr
