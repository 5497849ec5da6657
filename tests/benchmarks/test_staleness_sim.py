"""The simulated cluster has the properties on which its table relies."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from agentrl.workers import dispatcher
from benchmarks import staleness_report, virtual_time
from benchmarks.staleness_sim import World, main, row, simulate
from benchmarks.staleness_stores import OurStore, Rule
from benchmarks.staleness_workers import MAX_LAG, WorkedSimulation

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


def test_half_a_version_of_lag_is_at_most_half_of_each_batch() -> None:
    lags = simulate(SMALL, max_lag=0.5, rule="drop").lags
    batches = [lags[at : at + SMALL.groups_per_step] for at in range(0, len(lags), SMALL.groups_per_step)]
    assert max(lags) == 1 and max(batch.count(1) for batch in batches) <= SMALL.groups_per_step // 2


def test_whole_lags_are_those_of_whole_numbers() -> None:
    fraction, whole = (simulate(SMALL, max_lag=lag, rule="drop") for lag in (2.0, 2))
    assert (fraction.hours, fraction.lags, fraction.dropped_s) == (whole.hours, whole.lags, whole.dropped_s)


def test_oversampling_makes_more_steps_without_lag_and_loses_nothing() -> None:
    apart, over = (simulate(SMALL, max_lag=0, rule=rule) for rule in ("drop", "oversample"))  # type: ignore[arg-type]
    assert over.hours < apart.hours and over.dropped_s == []
    assert max(apart.lags) == 0 < max(over.lags)


def test_tail_batching_makes_more_steps_without_any_lag_and_trains_every_length() -> None:
    apart, tail = (simulate(SMALL, max_lag=0, rule=rule) for rule in ("drop", "tail"))  # type: ignore[arg-type]
    assert tail.hours < apart.hours and tail.dropped_s == []
    assert max(tail.lags) == 0
    assert max(tail.trained_s) > 2 * statistics.median(tail.trained_s)


def test_workers_change_nothing_until_the_orchestrator_s_core_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "TICK_S", 10.0)  # no lease ends here

    def worked(load: float) -> tuple[float, float]:
        simulation = WorkedSimulation(SMALL, num_workers=4, load=load)
        outcome, seconds = virtual_time.run(simulation.worked())
        assert len(outcome.lags) == SMALL.steps * SMALL.groups_per_step and max(outcome.lags) <= MAX_LAG
        return outcome.hours, simulation.core.busy_s / seconds

    alone = simulate(SMALL, max_lag=MAX_LAG, rule="drop").hours
    (light, idle), (heavy, busy) = worked(1), worked(20_000)
    assert light == pytest.approx(alone, rel=0.1) and idle < 0.05
    assert heavy > 2 * alone and busy > 0.9


def test_waiting_drops_nothing() -> None:
    assert simulate(SMALL, max_lag=2, rule="wait").dropped_s == []


@pytest.mark.parametrize(("rule", "restarts"), [("requeue", False), ("tail", True)])
async def test_a_task_that_is_asked_again_is_the_same_task(rule: Rule, restarts: bool) -> None:
    """Two groups end. Both are too old, or a step takes one of them and the other's task waits for a long step."""
    store = OurStore(1 if restarts else 2, max_lag=0, rule=rule)
    first = [await store.admit() for _ in range(2)]
    for group_id, _ in first:
        await store.finish(group_id, version=0 if restarts else -1, is_useless=False)
    if restarts:
        await store.take()
        await store.commit(1)
    expected = [task for _, task in first][restarts:]
    assert [(await store.admit())[1] for _ in expected] == expected


def test_what_is_dropped_is_long() -> None:
    found = row(SMALL, simulate(SMALL, max_lag=1, rule="drop"), max_lag=1, rule="drop")
    assert found.dropped > 0
    assert found.dropped_length is not None and found.dropped_length > 1 > found.trained_length


def test_the_capacity_formula_trains_on_what_is_older_than_k() -> None:
    found = row(SMALL, simulate(SMALL, max_lag=1, rule="capacity"), max_lag=1, rule="capacity")
    assert found.too_old > 0 and found.dropped == 0 and found.largest_lag > 1


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate(SMALL, max_lag=2, rule="drop", seed=3) for _ in range(2))
    assert (first.hours, first.lags) == (second.hours, second.lags)


def test_the_table_is_made_in_pieces_and_drawn(tmp_path: Path) -> None:
    kept = tmp_path / "sim.json"
    for lag in ("1", "0"):
        main(["--lags", lag, "--rules", "drop", "capacity", "--engines", "300", "--steps", "2", "--out", str(kept)])
    with pytest.raises(SystemExit, match="other settings"):
        main(["--lags", "0", "--rules", "drop", "--engines", "300", "--steps", "3", "--out", str(kept)])
    staleness_report.main([str(kept)])
    lines = [line for line in kept.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:2] for line in lines[1:]] == [
        ["| drop", "0"],
        ["| capacity", "0"],
        ["| drop", "1"],
        ["| capacity", "1"],
    ]
    assert "</svg>" in kept.with_suffix(".svg").read_text()
