"""Tenants share slots in turn, and none can take all sessions or all places in the queue."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from sandbox.tenants import FairSlots, Shares
from tests.sandbox.conftest import SECOND_TOKEN, TOKEN, start_service, stop_service


async def _call(slots: FairSlots, tenant: str, order: list[str]) -> None:
    async with slots.of(tenant):
        order.append(tenant)
        await asyncio.sleep(0)


async def test_a_tenant_with_many_calls_does_not_keep_others_waiting() -> None:
    slots, order = FairSlots(1), list[str]()
    async with asyncio.TaskGroup() as group:
        for tenant in [*"aaaaaa", *"bb", "c"]:
            group.create_task(_call(slots, tenant, order))
    assert order == ["a", "a", "b", "c", "a", "b", "a", "a", "a"]


@pytest.mark.parametrize("when", ["waiting", "at its turn"])
async def test_a_call_that_is_cancelled_gives_its_place_to_the_next(when: str) -> None:
    slots, order = FairSlots(1), list[str]()
    async with asyncio.timeout(60):
        async with slots.of("a"):
            cancelled = asyncio.create_task(_call(slots, "b", order))
            following = asyncio.create_task(_call(slots, "b", order))
            other = asyncio.create_task(_call(slots, "c", order))
            await asyncio.sleep(0)
            if when == "waiting":
                cancelled.cancel()
        cancelled.cancel()
        await asyncio.gather(cancelled, following, other, return_exceptions=True)
        async with slots.of("a"):  # none is lost
            order.append("a")
    assert cancelled.cancelled()
    assert sorted(order) == ["a", "b", "c"]


async def test_no_more_calls_run_than_there_are_slots() -> None:
    slots, running, most = FairSlots(3), 0, 0

    async def call(number: int) -> None:
        nonlocal running, most
        async with slots.of(str(number % 4)):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    tasks = [asyncio.create_task(call(number)) for number in range(200)]
    for number in range(0, 200, 7):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3 and running == 0


def test_one_tenant_alone_may_have_everything_and_gets_it_back() -> None:
    shares = Shares(5, num_tenants=1)
    assert [shares.add("a") for _ in range(6)] == [True] * 5 + [False]
    shares.remove("a")
    assert shares.add("a") and not shares.has_room("a")


def test_each_tenant_keeps_a_share_that_others_cannot_take() -> None:
    shares = Shares(12, num_tenants=3)
    taken = {tenant: sum(shares.add(tenant) for _ in range(50)) for tenant in "abc"}
    assert taken == {"a": 8, "b": 2, "c": 2}


def test_a_tenant_with_all_sessions_that_it_may_open_leaves_some_to_others() -> None:
    flags = ("--backend", "unsafe", "--allow-unsafe", "--preload", "", "--slots", "1", "--max-sessions", "4")
    service = start_service(*flags, "--token-env", "TEST_TOKENS")
    try:
        for token, expected in ((TOKEN, [200] * 3 + [429]), (SECOND_TOKEN, [200, 429])):
            headers = {"Authorization": f"Bearer {token}"}
            with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
                assert [http.post("/v1/sessions", json={}).status_code for _ in expected] == expected
    finally:
        stop_service(service)
