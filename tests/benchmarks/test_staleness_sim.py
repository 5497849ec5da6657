"""The simulated cluster keeps the promises that its table is read for."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import virtual_time
from benchmarks.staleness_sim import COLUMNS, World, row, simulate

SMALL = World(num_engines=20, groups_per_step=8, group_size=2, steps=12, warm_up=3)


def test_an_hour_passes_at_once() -> None:
    async def wait() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(wait()) == pytest.approx(3600, abs=1)


def test_a_deadlock_is_said_instead_of_waited_for() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(wait())


@pytest.mark.parametrize("rule", ["drop", "requeue", "wait"])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_buffer_trains_on_nothing_older_than_k(rule: str, max_lag: int) -> None:
    outcome = simulate(SMALL, max_lag=max_lag, rule=rule)  # type: ignore[arg-type]
    assert len(outcome.lags) == SMALL.steps * SMALL.groups_per_step
    assert max(outcome.lags) <= max_lag


def test_waiting_drops_nothing() -> None:
    outcome = simulate(SMALL, max_lag=2, rule="wait")
    assert len(outcome.played_s) <= len(outcome.trained_s) + 3 * SMALL.groups_per_step  # what the end cut off


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate(SMALL, max_lag=2, rule="drop", seed=3) for _ in range(2))
    assert (first.hours, first.lags) == (second.hours, second.lags)


def test_a_row_has_every_column() -> None:
    assert len(row(SMALL, simulate(SMALL, max_lag=1, rule="capacity"), max_lag=1, rule="capacity")) == len(COLUMNS)
