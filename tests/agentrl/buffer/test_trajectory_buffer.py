"""The staleness rule, the slots and the ledger, one property each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.journal import Journal
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.errors import NoLearningSignal
from agentrl.testing import one_token_group
from agentrl.types import (
    Task,
    TrajectoryGroup,
)

TASK = Task(id="t", prompt="?", answer="1")


def make_group(group_id: int, *, version: int, rewards: Sequence[float] = (0.0, 1.0)) -> TrajectoryGroup:
    return one_token_group(group_id, task=TASK, versions=[version] * len(rewards), rewards=rewards)


def make_buffer(
    *, groups_per_step: int = 1, max_lag: float = 1, on_stale: OnStale = "drop", requeued: list[Task] | None = None
) -> TrajectoryBuffer:
    sink = requeued if requeued is not None else []
    return TrajectoryBuffer(
        StalenessRule(groups_per_step=groups_per_step, max_lag=max_lag, on_stale=on_stale),
        journal=Journal(":memory:"),
        requeue=sink.append,
    )


async def admit(buffer: TrajectoryBuffer) -> int:
    group_id, _ = await buffer.admit(lambda: (TASK, 0))
    return group_id


async def test_admission_stops_at_lag_plus_one_batches() -> None:
    buffer = make_buffer(groups_per_step=2, max_lag=1)
    for _ in range(4):
        await admit(buffer)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(admit(buffer), 0.01)


async def test_a_task_is_drawn_only_when_its_slot_is_free() -> None:
    buffer, drawn = make_buffer(max_lag=0), iter([TASK])
    await admit(buffer)
    waiting = asyncio.create_task(buffer.admit(lambda: (next(drawn), 0)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert next(drawn) is TASK


async def test_slots_are_freed_by_commit_not_by_take() -> None:
    buffer = make_buffer(max_lag=0)
    await buffer.finish(make_group(await admit(buffer), version=0))
    await buffer.take()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(admit(buffer), 0.01)
    await buffer.commit(1)
    assert await asyncio.wait_for(admit(buffer), 1) == 1


async def test_batch_is_the_oldest_groups_first() -> None:
    buffer = make_buffer(max_lag=2)
    ids = [await admit(buffer) for _ in range(3)]
    for group_id in reversed(ids):
        await buffer.finish(make_group(group_id, version=0))
    assert [group.group_id for group in (await buffer.take()).groups] == [ids[0]]


async def overtaken(on_stale: OnStale, requeued: list[Task] | None = None) -> TrajectoryBuffer:
    """Group 0 runs on while group 1 is trained and published, then finishes with version-0 tokens; max_lag 0 + 1."""
    buffer = make_buffer(max_lag=1, on_stale=on_stale, requeued=requeued)
    slow = await admit(buffer)
    for version in (1, 2):
        await buffer.finish(make_group(await admit(buffer), version=version - 1))
        await buffer.take()
        await buffer.commit(version)
    await buffer.finish(make_group(slow, version=0))
    return buffer


async def test_stale_group_is_dropped_and_its_length_recorded() -> None:
    buffer = await overtaken("drop")
    await buffer.finish(make_group(await admit(buffer), version=2))
    assert [group.group_id for group in (await buffer.take()).groups] == [3]
    assert buffer.ledger().dropped_stale == 1
    assert buffer.pop_dropped_lengths() == [1, 1]


async def test_stale_task_is_asked_again_on_requeue() -> None:
    requeued: list[Task] = []
    buffer = await overtaken("requeue", requeued)
    await buffer.commit(3)
    assert requeued == [TASK]


async def test_wait_mode_holds_the_learner_for_the_oldest_group() -> None:
    buffer = make_buffer(max_lag=1, on_stale="wait")
    slow = await admit(buffer)
    await buffer.finish(make_group(await admit(buffer), version=0))
    await buffer.take()
    await buffer.commit(1)
    await buffer.finish(make_group(await admit(buffer), version=1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.take(), 0.01)
    await buffer.finish(make_group(slow, version=0))
    assert [group.group_id for group in (await buffer.take()).groups] == [slow]


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.1 + 0.2, 0.3)])
async def test_equal_rewards_free_the_slot_and_are_counted(rewards: tuple[float, ...]) -> None:
    """Also those that only round differently: the learner has no gradient for them either."""
    buffer = make_buffer(max_lag=0)
    await buffer.finish(make_group(await admit(buffer), version=0, rewards=rewards))
    assert buffer.ledger().dropped_zero_variance == 1
    assert await asyncio.wait_for(admit(buffer), 1) == 1


async def test_a_run_without_any_signal_ends_with_a_reason() -> None:
    buffer = make_buffer(max_lag=0)
    for _ in range(8):
        await buffer.finish(make_group(await admit(buffer), version=0, rewards=(0.0, 0.0)))
    with pytest.raises(NoLearningSignal, match=r"0 % of those .* by every episode, 100 % by none"):
        await buffer.take()


async def test_a_run_whose_outcome_depends_on_the_task_is_not_told_that_nothing_succeeds() -> None:
    buffer = make_buffer(max_lag=0)
    for number in range(12):
        reward = float(number % 2)
        await buffer.finish(make_group(await admit(buffer), version=0, rewards=(reward, reward)))
    assert (buffer.signal.groups, buffer.signal.solved, buffer.signal.unsolved) == (8, 4, 4)  # the newest 8
    with pytest.raises(NoLearningSignal, match=r"50 % of those .* 50 % by none \(mean reward 0.50\)"):
        await buffer.take()
    assert buffer.signal.useful_share == 0
    assert (buffer.pop_signal().groups, buffer.pop_signal().groups) == (12, 0)  # each is counted once


async def test_failed_group_frees_its_slot() -> None:
    buffer = make_buffer(max_lag=0)
    await buffer.fail(await admit(buffer), "sandbox gone")
    assert buffer.ledger().failed == 1
    assert await asyncio.wait_for(admit(buffer), 1) == 1


def test_finished_groups_survive_without_a_clean_close(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    group = make_group(0, version=0)
    first.issued(0, TASK)
    first.ready(group)
    # No close: another connection sees what a restart after kill -9 would see.
    assert Journal(path).resume_at(0).ready == (group,)


async def test_half_a_version_of_lag_is_half_a_batch() -> None:
    """ROLL Flash with alpha 0.5 and 8 groups a step: 12 slots, lag 1 at most, and in 4 groups of a batch at most."""
    buffer = make_buffer(groups_per_step=8, max_lag=0.5)
    for version in range(4):
        while buffer.num_slots > buffer.ledger().ready:
            await buffer.finish(make_group(await admit(buffer), version=version))
        assert buffer.ledger().ready == 12
        batch = await buffer.take()
        lags = [version - group.policy_version for group in batch.groups]
        assert batch.max_lag == 1 and lags == ([1] * 4 + [0] * 4 if version else [0] * 8)
        await buffer.commit(version + 1)
    assert buffer.ledger().dropped_stale == 0


async def test_what_exceeds_the_places_of_the_largest_lag_is_dropped_at_once() -> None:
    buffer = make_buffer(groups_per_step=2, max_lag=1.5)  # five slots; one place a batch for lag 2
    slow = [await admit(buffer) for _ in range(3)]
    for version in (1, 2):
        for _ in range(2):
            await buffer.finish(make_group(await admit(buffer), version=version - 1))
        await buffer.take()
        await buffer.commit(version)
    for group_id in slow:
        await buffer.finish(make_group(group_id, version=0))
    assert (buffer.ledger().ready, buffer.ledger().dropped_stale) == (1, 2)
    await buffer.finish(make_group(await admit(buffer), version=2))
    assert [group.group_id for group in (await buffer.take()).groups] == [slow[0], 7]


async def test_groups_are_finished_and_trained_however_old_they_are() -> None:
    buffer = await overtaken("finish")
    batch = await buffer.take()
    assert [group.group_id for group in batch.groups] == [0] and batch.max_lag is None
    assert batch.policy_version - batch.groups[0].policy_version == 2 and buffer.ledger().dropped_stale == 0


async def test_less_lag_stops_admission_and_more_lets_it_go_on() -> None:
    buffer = make_buffer(groups_per_step=2, max_lag=1)
    await buffer.set_lag(0)
    for _ in range(2):
        await admit(buffer)
    waiting = asyncio.create_task(admit(buffer))
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.set_lag(1)
    assert await asyncio.wait_for(waiting, 1) == 2


@pytest.mark.parametrize("lag", [-1, 2])
async def test_lag_outside_what_the_buffer_was_made_for_is_refused(lag: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        await make_buffer(max_lag=1).set_lag(lag)


async def test_groups_admitted_before_the_lag_shrank_are_still_trained() -> None:
    buffer = make_buffer(max_lag=2)
    ids = [await admit(buffer) for _ in range(3)]
    await buffer.set_lag(0)
    for group_id in ids:
        await buffer.finish(make_group(group_id, version=0))
        assert [group.group_id for group in (await buffer.take()).groups] == [group_id]
        await buffer.commit(buffer.version + 1)
    assert buffer.ledger().trained == 3


@settings(max_examples=60, deadline=None)
@given(data=st.data(), max_lag=st.integers(0, 3), groups_per_step=st.integers(1, 3))
def test_the_bounds_hold_while_the_lag_changes(data: st.DataObject, max_lag: int, groups_per_step: int) -> None:
    """In order of admission, every group is consumed within the lag that admission worked with when it came in."""

    async def scenario() -> None:
        buffer = make_buffer(groups_per_step=groups_per_step, max_lag=max_lag)
        lag, promised, flying = max_lag, {}, []
        for _ in range(60):
            action = data.draw(st.sampled_from(("admit", "finish", "step", "lag")))
            outstanding = buffer.ledger().issued - _closed(buffer)
            assert buffer.num_slots == (lag + 1) * groups_per_step
            if action == "lag":
                lag = data.draw(st.integers(0, max_lag))
                await buffer.set_lag(lag)
            elif action == "admit" and outstanding < buffer.num_slots:
                group_id = await asyncio.wait_for(admit(buffer), 1)
                promised[group_id] = lag
                flying.append((group_id, buffer.version))
            elif action == "finish" and flying:
                group_id, version = flying.pop(0)
                await buffer.finish(make_group(group_id, version=version))
            elif action == "step" and buffer.ledger().ready >= groups_per_step:
                for group in (await asyncio.wait_for(buffer.take(), 1)).groups:
                    assert buffer.version - group.policy_version <= promised[group.group_id]
                await buffer.commit(buffer.version + 1)
            assert buffer.ledger().balanced()
        assert buffer.ledger().dropped_stale == 0

    asyncio.run(scenario())


def _closed(buffer: TrajectoryBuffer) -> int:
    ledger = buffer.ledger()
    return ledger.issued - ledger.in_flight - ledger.ready - ledger.training


async def test_the_learner_takes_its_next_batch_while_engines_take_its_weights() -> None:
    """Its age is the learner's, and no slot is free before the engines hold the weights."""
    buffer = make_buffer(max_lag=1)
    for _ in range(2):
        await buffer.finish(make_group(await admit(buffer), version=0))
    assert (await buffer.take()).policy_version == 0
    await buffer.stepped(1)
    batch = await buffer.take()
    assert batch.policy_version == 1 and batch.groups[0].policy_version == 0
    assert buffer.version == 0 and buffer.ledger().training == 2 and buffer.ledger().balanced()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(admit(buffer), 0.01)
    await buffer.commit(1)
    assert (buffer.ledger().trained, buffer.ledger().training, buffer.version) == (1, 1, 1)
    await asyncio.wait_for(admit(buffer), 1)


async def test_without_lag_there_is_no_batch_before_the_engines_hold_the_weights() -> None:
    buffer = make_buffer(max_lag=0)
    await buffer.finish(make_group(await admit(buffer), version=0))
    await buffer.take()
    await buffer.stepped(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.take(), 0.01)


async def test_two_steps_that_no_engine_has_yet_are_made_again_after_a_crash(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    buffer = TrajectoryBuffer(StalenessRule(groups_per_step=1, max_lag=1), journal=journal)
    for _ in range(2):
        await buffer.finish(make_group(await admit(buffer), version=0))
    await buffer.take()
    await buffer.stepped(1)
    await buffer.take()
    assert [[group.group_id for group in batch] for batch in journal.resume_at(0).batches] == [[0], [1]]
    assert [[group.group_id for group in batch] for batch in journal.resume_at(1).batches] == [[1]]
    journal.close()


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(1, 4),
    groups_per_step=st.integers(1, 3),
    on_stale=st.sampled_from(["drop", "wait"]),
    moves=st.lists(st.sampled_from(["play", "play", "take", "step", "commit"]), max_size=120),
)
def test_groups_that_finish_in_turn_are_never_too_old_however_late_the_engines_are(
    max_lag: int, groups_per_step: int, on_stale: OnStale, moves: list[str]
) -> None:
    """Every group is sampled under the engines' version, oldest first; the learner is one version ahead or not."""

    async def live() -> None:
        buffer = make_buffer(groups_per_step=groups_per_step, max_lag=max_lag, on_stale=on_stale)
        learner, is_training, num_taken = 0, False, 0
        for move in moves:
            ledger = buffer.ledger()
            if move == "play" and ledger.ready + ledger.training < buffer.num_slots:
                await buffer.finish(make_group(await admit(buffer), version=buffer.version))
            elif move == "take" and not is_training and ledger.ready >= groups_per_step:
                batch = await asyncio.wait_for(buffer.take(), 5)
                assert batch.policy_version == learner
                assert all(learner - group.policy_version <= max_lag for group in batch.groups)
                is_training, num_taken = True, num_taken + 1
            elif move == "step" and is_training and buffer.version == learner:
                learner, is_training = learner + 1, False
                await buffer.stepped(learner)
            elif move == "commit" and buffer.version < learner:
                await buffer.commit(learner)
            assert buffer.ledger().balanced() and buffer.ledger().dropped_stale == 0

    asyncio.run(live())


class ArealAdmission:
    """AReaL's rule, from its paper alone: arXiv 2505.24298, section 5.1, equation 3.

        floor((N_r - 1) / B) <= i + eta

    N_r: requests so far with the one in question, B: batch, i: version of the policy, eta: allowed staleness. Groups
    stand for its requests; those that were rejected (equal rewards, failed) do not count, as in its code.
    """

    def __init__(self, *, batch: int, eta: int) -> None:
        self.batch, self.eta, self.version, self.num_requests = batch, eta, 0, 0

    def may_start(self) -> bool:
        return (self.num_requests + 1 - 1) // self.batch <= self.version + self.eta


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    eta=st.integers(0, 4),
    events=st.lists(st.sampled_from(["start", "start", "finish", "finish", "useless", "fail", "step"]), max_size=120),
    seed=st.integers(0, 2**16),
)
def test_finish_admits_exactly_by_the_formula_of_areal(batch: int, eta: int, events: list[str], seed: int) -> None:
    """After every event the buffer has a slot if and only if the formula lets another group start."""

    async def run() -> None:
        buffer = make_buffer(groups_per_step=batch, max_lag=eta, on_stale="finish")
        areal, rng, flying = ArealAdmission(batch=batch, eta=eta), random.Random(seed), list[int]()
        for event in events:
            if event == "step" and buffer.ledger().ready >= batch:
                await buffer.take()
                assert await admits(buffer) == areal.may_start(), "taking a batch frees no slot"
                areal.version += 1
                await buffer.commit(areal.version)
            elif event == "start" and areal.may_start():
                flying.append(await admit(buffer))
                areal.num_requests += 1
            elif event in ("finish", "useless") and flying:
                group_id = flying.pop(rng.randrange(len(flying)))
                rewards = (0.0, 1.0) if event == "finish" else (1.0, 1.0)
                await buffer.finish(make_group(group_id, version=rng.randint(0, areal.version), rewards=rewards))
                areal.num_requests -= event == "useless"
            elif event == "fail" and flying:
                await buffer.fail(flying.pop(), "sandbox gone")
                areal.num_requests -= 1
            assert await admits(buffer) == areal.may_start()

    asyncio.run(run())


async def admits(buffer: TrajectoryBuffer) -> bool:
    """Whether a group would be admitted now; none is."""

    def draw() -> tuple[Task, int]:
        raise LookupError

    asking = asyncio.create_task(buffer.admit(draw))
    for _ in range(5):
        await asyncio.sleep(0)
    asking.cancel()
    try:
        await asking
    except LookupError:
        return True
    except asyncio.CancelledError:
        return False
    raise AssertionError("admitted without a task")
