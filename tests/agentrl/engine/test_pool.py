"""Routing, ejection and return, and updates of a pool, with engines that fail when a test asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest

from agentrl.config.engine import UpdateOrder
from agentrl.engine import pool as engine_pool
from agentrl.engine import pooled_engine, transfer_group
from agentrl.engine.base import EngineState, Parity, Receivers, WeightUpdate
from agentrl.engine.metered import MeteredEngine
from agentrl.engine.pool import EnginePool
from agentrl.errors import EngineError, EngineGone, LearnerError, PreviousWeightsKept, WeightsWanted, WeightSyncError
from agentrl.training.learner_session import LearnerSession
from agentrl.types import Completion, FinishReason, Probe, Sampling, TransferInit, VersionSpan, WeightsRef

SAMPLING = Sampling(max_tokens=4)


@dataclass(eq=False)
class Breakable:
    """An engine that answers with its version, and fails as `breaks` says."""

    url: str
    breaks: Callable[[str], EngineError | WeightsWanted | None] = lambda what: None
    version: int = 0
    asked: list[str] = field(default_factory=list)
    is_entered: bool = False
    num_at_once: int = 0
    most_at_once: int = 0
    latency_s: float = 0.0
    updates: list[tuple[str, int]] = field(default_factory=list)
    wants_weights: bool = False
    joins: list[tuple[int, int]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._fail("enter")
        self.is_entered = True
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.is_entered = False

    def _fail(self, what: str) -> None:
        if error := self.breaks(what):
            raise error

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        self.asked.append(request_id)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(self.latency_s)
            self._fail("generate")
        finally:
            self.num_at_once -= 1
        return Completion(
            token_ids=(1,),
            behavior_logprobs=(-1.0,),
            version_spans=(VersionSpan(version=self.version, start=0, end=1),),
            finish_reason=FinishReason.STOP,
        )

    async def health(self) -> None:
        self._fail("health")

    async def recover(self) -> None:
        self._fail("recover")

    def states(self) -> tuple[EngineState, ...]:
        return (EngineState(url=self.url, model="policy", version=self.version, is_open=True, is_serving=True),)

    async def check(self, index: int) -> None:
        raise AssertionError("a pool looks at its engines itself")

    async def receivers(self, policy_version: int) -> Receivers:
        raise AssertionError("a pool knows its engines")

    async def init_transfer(self, init: TransferInit) -> None:
        self.joins.append((init.init_info["rank_offset"], init.init_info["world_size"]))
        self._fail("join")

    async def pause(self) -> None:
        self._fail("pause")
        self.updates.append(("pause", self.version))

    async def sleep(self) -> None:
        self._fail("sleep")
        self.updates.append(("sleep", self.version))

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        self.updates.append(("begin", ref.policy_version))
        await asyncio.sleep(0.01)
        self.wants_weights = isinstance(self.breaks("update"), WeightsWanted)
        self._fail("update")
        self.version = ref.policy_version
        self.updates.append(("end", ref.policy_version))
        parity = Parity(max_abs=0.1 * len(self.url), mean_abs=0.0, kl=0.0)
        return WeightUpdate(gap_s=0.1 * len(self.url), num_bytes=7, parity=parity)

    def metrics(self) -> dict[str, float]:
        return {"engine/restarts": 1.0}


def ref(version: int) -> WeightsRef:
    probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
    return WeightsRef(policy_version=version, num_bytes=7, update_info={"path": "/w"}, checksum="", probe=probe)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "FIRST_RETURN_S", 0.01)


@asynccontextmanager
async def pool_of(
    *engines: Breakable, order: UpdateOrder = "simultaneous", return_timeout_s: float = 5.0
) -> AsyncIterator[EnginePool]:
    async with EnginePool(engines, order=order, return_timeout_s=return_timeout_s) as pool:
        yield pool
    assert not any(engine.is_entered for engine in engines)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_episode_stays_on_its_engine_and_new_ones_go_where_least_is_running() -> None:
    first, second = Breakable("a", latency_s=0.02), Breakable("b", latency_s=0.02)
    async with pool_of(first, second) as pool:
        for turn in range(3):
            await asyncio.gather(
                *(
                    pool.generate([1], SAMPLING, request_id=f"{episode}.{turn}", session_id=f"{episode}")
                    for episode in range(8)
                )
            )
    assert len(first.asked) == len(second.asked) == 12
    assert {name.partition(".")[0] for name in first.asked}.isdisjoint(
        {name.partition(".")[0] for name in second.asked}
    )


async def test_requests_of_an_engine_that_goes_away_are_answered_by_another() -> None:
    gone = EngineGone("a is dead")
    state: dict[str, EngineError | None] = {"generate": gone, "health": gone}
    dead, alive = Breakable("a", breaks=state.get), Breakable("b")
    async with pool_of(dead, alive) as pool:
        completions = await asyncio.gather(*(pool.generate([1], SAMPLING, request_id=f"{i}-0") for i in range(6)))
        assert len(completions) == 6
        assert pool.metrics()["engine/num_serving"] == 1
        state.clear()
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
    assert pool.metrics()["engine/ejections"] == 1


async def test_an_engine_returns_with_the_weights_that_were_made_while_it_was_out() -> None:
    gone = EngineGone("a is dead")
    state: dict[str, EngineError | None] = {"generate": gone, "health": gone}
    dead, alive = Breakable("a", breaks=state.get), Breakable("b")
    async with pool_of(dead, alive) as pool:
        await pool.update_weights(ref(1))
        await pool.generate([1], SAMPLING, request_id="0-0")
        await pool.update_weights(ref(2))
        assert (dead.version, alive.version) == (1, 2)
        state.clear()
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert dead.version == 2


async def test_what_is_wrong_with_a_request_is_not_blamed_on_the_engine() -> None:
    engine = Breakable("a", breaks=lambda what: EngineError("too long") if what == "generate" else None)
    async with pool_of(engine, Breakable("b", latency_s=1.0)) as pool:
        with pytest.raises(EngineError, match="too long"):
            await pool.generate([1], SAMPLING, request_id="0-0")
        assert pool.metrics()["engine/num_serving"] == 2


async def test_an_engine_that_fails_every_request_is_taken_out_although_it_answers() -> None:
    sick = Breakable("a", breaks=lambda what: EngineError("NaN") if what in ("generate", "recover") else None)
    well = Breakable("b", latency_s=0.01)
    async with pool_of(sick, well) as pool:
        answers = [
            (await asyncio.gather(pool.generate([1], SAMPLING, request_id=f"{i}-0"), return_exceptions=True))[0]
            for i in range(8)
        ]
    assert [type(answer).__name__ for answer in answers] == ["EngineError"] * 2 + ["Completion"] * 6


async def test_an_update_that_one_engine_refuses_takes_it_out_and_no_old_version_serves() -> None:
    state: dict[str, EngineError | None] = {"update": WeightSyncError("another checksum")}
    false, good = Breakable("a", breaks=state.get), Breakable("bb")
    async with pool_of(false, good) as pool:
        update = await pool.update_weights(ref(1))
        assert update.gap_s == pytest.approx(0.2)
        completions = [await pool.generate([1], SAMPLING, request_id=f"{i}-0") for i in range(4)]
        assert {completion.version_spans[0].version for completion in completions} == {1}
        state.clear()
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert false.version == 1


async def test_an_engine_that_was_ended_in_its_update_leaves_and_takes_the_weights_when_it_is_back() -> None:
    """As one does that slept and did not wake. Others are waited for."""
    wanted = [WeightsWanted("it did not wake"), WeightsWanted("it did not wake")]
    ended = Breakable("a", breaks=lambda what: wanted.pop() if what == "update" and wanted else None)
    good = Breakable("bb")
    async with pool_of(ended, good) as pool:
        assert (await pool.update_weights(ref(1))).gap_s == pytest.approx(0.2)
        assert good.version == 1 and ended.version == 0
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert ended.version == 1 and wanted == []


def changed(version: int) -> WeightsRef:
    """What changed since an older version."""
    return replace(ref(version), update_info={"path": "/w", "deltas": ["/w/changes"]})


@pytest.mark.parametrize("unable", [{"a", "b"}, {"b"}])
async def test_changes_that_an_engine_cannot_use_are_followed_by_all_weights(unable: set[str]) -> None:
    """Also when the other engine could use them: where engines round adapters differently they never could."""

    def engine(url: str) -> Breakable:
        wanted, unable_here = WeightsWanted("other weights came of it"), url in unable
        return Breakable(url, breaks=lambda what: wanted if what == "update" and unable_here and broken else None)

    broken, engines = [True], [engine("a"), engine("b")]
    async with pool_of(*engines) as pool:
        with pytest.raises(WeightsWanted, match=f"the engine at {min(unable)} needs all weights"):
            await pool.update_weights(changed(1))
        assert pool.wants_weights
        num_updates = len(engines[1].updates)
        with pytest.raises(WeightsWanted, match=r"version 2.*needs all weights"):
            await pool.update_weights(changed(2))
        assert len(engines[1].updates) == num_updates, "changes were tried again"
        broken.clear()
        await pool.update_weights(ref(2))
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert not pool.wants_weights and {one.version for one in engines} == {2}
        await pool.update_weights(changed(3))
        assert {one.version for one in engines} == {3}


async def test_a_returning_engine_that_cannot_use_the_changes_is_given_all_weights_before_the_next_batch() -> None:
    """The learner is told when it asks for a batch: at lag 0 there may be no other publication before."""
    errors: dict[str, EngineError | WeightsWanted] = {}
    late = Breakable("a", breaks=errors.get)
    async with pool_of(late, Breakable("b")) as pool:
        await pool.update_weights(changed(1))
        errors |= {"generate": EngineGone(), "health": EngineGone(), "update": WeightsWanted("a stale disk")}
        await pool.generate([1], SAMPLING, request_id="1")
        await until(lambda: pool.metrics()["engine/num_serving"] == 1)
        assert not pool.wants_weights, "nothing is known of it before it is back"
        del errors["health"]
        await until(lambda: pool.wants_weights)
        errors.clear()
        await pool.update_weights(ref(1))
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert not pool.wants_weights


async def test_an_engine_that_wanted_all_weights_and_died_costs_no_further_publication_of_all() -> None:
    errors: dict[str, EngineError | WeightsWanted] = {"update": WeightsWanted("other weights came of it")}
    dead, good = Breakable("a", breaks=errors.get), Breakable("b")
    async with pool_of(dead, good) as pool:
        with pytest.raises(WeightsWanted, match="the engine at a needs all weights"):
            await pool.update_weights(changed(1))
        errors["health"] = EngineGone()
        await until(lambda: not pool.wants_weights)
        await pool.update_weights(changed(2))
        assert good.version == 2
        errors.pop("health")  # it returns, and cannot use the changes once more
        await until(lambda: pool.wants_weights)
        errors.clear()
        await pool.update_weights(ref(2))
        await until(lambda: pool.metrics()["engine/num_serving"] == 2)
        assert dead.version == 2 and not pool.wants_weights


async def test_an_engine_that_never_proves_its_weights_is_given_up() -> None:
    false = Breakable("a", breaks=lambda what: WeightSyncError("a checksum") if what == "update" else None)
    async with pool_of(false, Breakable("b")) as pool:
        await pool.update_weights(ref(1))
        await until(lambda: len(false.updates) == pooled_engine.MAX_FALSE_UPDATES)
        await asyncio.sleep(0.1)
    assert len(false.updates) == pooled_engine.MAX_FALSE_UPDATES


async def test_an_update_that_no_engine_takes_is_an_error() -> None:
    engines = [
        Breakable(url, breaks=lambda what: WeightSyncError("false weights") if what == "update" else None)
        for url in "ab"
    ]
    async with pool_of(*engines) as pool:
        with pytest.raises(WeightSyncError, match="no engine took version 1: false weights"):
            await pool.update_weights(ref(1))
        with pytest.raises(WeightSyncError, match="no engine is left"):
            await pool.generate([1], SAMPLING, request_id="0-0")


async def test_without_any_engine_a_request_waits_and_then_says_so() -> None:
    gone = EngineGone("dead")
    async with pool_of(
        Breakable("a", breaks=lambda what: gone if what != "enter" else None), return_timeout_s=0.1
    ) as pool:
        with pytest.raises(EngineError, match=r"none of 1 engines came back within 0.1 s: dead"):
            await pool.generate([1], SAMPLING, request_id="0-0")


@pytest.mark.parametrize("order", ["simultaneous", "rolling"])
async def test_updates_reach_all_at_once_or_one_after_the_other(order: UpdateOrder) -> None:
    events: list[tuple[str, int]] = []
    engines = [Breakable("a", updates=events), Breakable("bbb", updates=events)]
    async with pool_of(*engines, order=order) as pool:
        update = await pool.update_weights(ref(1))
    one_by_one = [("begin", 1), ("end", 1)] * 2
    assert events == (one_by_one if order == "rolling" else sorted(one_by_one))
    assert update.parity is not None and update.parity.max_abs == pytest.approx(0.3)


async def test_one_that_cannot_be_entered_leaves_none_entered() -> None:
    engines = [Breakable("a"), Breakable("b", breaks=lambda what: EngineError("not in RL mode"))]
    with pytest.raises(EngineError, match="not in RL mode"):
        async with pool_of(*engines):
            pass
    assert not any(engine.is_entered for engine in engines)


def streamed(version: int, checksum: str = "") -> WeightsRef:
    probe = Probe(token_ids=(1, 2), logprobs=(-1.0,))
    return WeightsRef(policy_version=version, num_bytes=7, update_info={}, checksum=checksum, probe=probe)


async def published(pool: EnginePool, version: int, workers: int = 1) -> WeightUpdate:
    """As the learner does, until every engine of a group has taken it."""
    while True:
        number = len((await pool.receivers(version)).engines)
        try:
            if number:
                info = {"rank_offset": 1, "world_size": 1 + number * workers}
                await pool.init_transfer(TransferInit(init_info=info))
            return await pool.update_weights(streamed(version))
        except WeightsWanted:
            continue


async def test_all_engines_join_one_group_with_ranks_of_their_own() -> None:
    engines = [Breakable("a"), Breakable("b"), Breakable("c")]
    async with pool_of(*engines) as pool:
        update = await published(pool, 1, workers=2)
        assert [engine.joins for engine in engines] == [[(1, 7)], [(3, 7)], [(5, 7)]]
        assert {engine.version for engine in engines} == {1} and update.gap_s == pytest.approx(0.1)
        assert not pool.wants_weights
        before = await pool.receivers(2)
        assert before == await pool.receivers(2) and len(before.engines) == 3  # the group can stay


async def test_an_engine_that_fails_in_a_group_leaves_and_the_others_take_the_weights_without_it() -> None:
    state: dict[str, EngineError | None] = {}
    dead, alive = Breakable("a", breaks=dying_in("update", state)), Breakable("b")
    async with pool_of(dead, alive) as pool:
        await published(pool, 1)
        state["alive"] = EngineError()
        await published(pool, 2)
        assert (dead.version, alive.version) == (1, 2)
        assert alive.joins == [(2, 3)] * 2 and dead.joins == [(1, 3)] * 2
        answers = [await pool.generate([1], SAMPLING, request_id=f"{i}-0") for i in range(3)]
        assert {answer.version_spans[0].version for answer in answers} == {2}
        assert not pool.wants_weights
        state.clear()
        await until(lambda: pool.wants_weights)
        num_updates = len(alive.updates)
        await published(pool, 2)
        assert dead.joins[-1] == (1, 2) and dead.version == 2  # a group of its own
        assert len(alive.updates) == num_updates and pool.metrics()["engine/num_serving"] == 2


def dying_in(what: str, state: dict[str, EngineError | None]) -> Callable[[str], EngineError | None]:
    """Dies at the first `what`, and is gone until `state` is cleared."""

    def breaks(now: str) -> EngineError | None:
        if now == what and state.pop("alive", None) is not None:
            state.update(update=EngineGone("a is dead"), health=EngineGone("a is dead"), join=EngineGone("a is dead"))
        return state.get(now)

    return breaks


class Hanging(Breakable):
    """Stays in the broadcast until the learner ends it."""

    learner_ends: asyncio.Event

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        if ref.policy_version == 2 and not self.learner_ends.is_set():
            await self.learner_ends.wait()
            raise WeightsWanted("it has a part of them")
        return await super().update_weights(ref)


async def test_the_learner_is_told_at_once_when_one_engine_of_a_group_dies_while_the_others_wait() -> None:
    state: dict[str, EngineError | None] = {}
    dead, waits = Breakable("a", breaks=dying_in("update", state)), Hanging("b")
    waits.learner_ends = asyncio.Event()
    async with pool_of(dead, waits) as pool:
        await published(pool, 1)
        state["alive"] = EngineError()
        await pool.receivers(2)
        await pool.init_transfer(TransferInit(init_info={"rank_offset": 1, "world_size": 3}))
        with pytest.raises(WeightsWanted, match="a is dead"):
            await pool.update_weights(streamed(2))
        waits.learner_ends.set()
        await published(pool, 2)
        assert waits.version == 2 and pool.metrics()["engine/num_serving"] == 1


async def test_an_engine_that_hangs_in_a_broken_group_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "SETTLE_S", 0.05)
    state: dict[str, EngineError | None] = {}
    hangs, alive = Hanging("a"), Breakable("b", breaks=state.get)
    hangs.learner_ends = asyncio.Event()
    async with pool_of(hangs, alive) as pool:
        await published(pool, 1)
        state["update"] = PreviousWeightsKept("too slow")
        await pool.receivers(2)
        with pytest.raises(WeightsWanted, match="too slow"):
            await pool.update_weights(streamed(2))
        state.clear()
        await published(pool, 2)
        assert (hangs.version, alive.version) == (1, 2) and pool.metrics()["engine/num_serving"] == 1
        assert not pool.wants_weights  # as long as it hangs
        hangs.learner_ends.set()
        await until(lambda: pool.wants_weights)
        await published(pool, 2)
        assert hangs.version == 2 and pool.metrics()["engine/num_serving"] == 2


async def test_one_that_cannot_join_breaks_the_group_for_this_time_only() -> None:
    state: dict[str, EngineError | None] = {"alive": EngineError()}
    dead, alive = Breakable("a", breaks=dying_in("join", state)), Breakable("b")
    async with pool_of(dead, alive) as pool:
        await pool.receivers(1)
        with pytest.raises(WeightsWanted, match="a did not join: a is dead"):
            await pool.init_transfer(TransferInit(init_info={"rank_offset": 1, "world_size": 3}))
        await published(pool, 1)
        assert (dead.version, alive.version) == (0, 1) and alive.joins == [(2, 3), (1, 2)]


async def test_one_that_dies_again_before_its_weights_are_sent_is_not_taken_for_one_that_has_them() -> None:
    state: dict[str, EngineError | None] = {}
    dead, alive = Breakable("a", breaks=dying_in("update", state)), Breakable("b")
    async with pool_of(dead, alive) as pool:
        session = LearnerSession(MeteredEngine(pool))
        state["alive"] = EngineError()
        await published(pool, 1)
        await session.weights_published(streamed(1))
        state.clear()
        await until(lambda: pool.wants_weights)
        assert len((await pool.receivers(1)).engines) == 1
        await pool.init_transfer(TransferInit(init_info={"rank_offset": 1, "world_size": 2}))
        state["health"] = state["update"] = EngineGone("a is dead")
        await asyncio.sleep(0.1)  # the pool asks every 0.01 s
        with pytest.raises(WeightsWanted, match="a"):  # else the learner would broadcast to nobody
            await session.weights_published(streamed(1))
        assert (await pool.receivers(1)).engines == ()


async def test_weights_of_a_restarted_learner_replace_others_of_the_same_version() -> None:
    engines = [Breakable("a"), Breakable("b")]
    async with pool_of(*engines) as pool:
        await published(pool, 1)
        assert (await pool.receivers(1)).engines == ()
        with pytest.raises(WeightsWanted, match="a, b has other weights of this version"):
            await pool.update_weights(streamed(1, checksum="another"))
        assert len((await pool.receivers(1)).engines) == 2


async def test_a_repeated_publication_counts_once() -> None:
    engine = Breakable("a")
    async with pool_of(engine) as pool:
        session = LearnerSession(MeteredEngine(pool))
        await asyncio.gather(*(session.weights_published(ref(1)) for _ in range(2)))
        assert (await session.weights(within_s=5)).policy_version == 1
        with pytest.raises(LearnerError, match="did not deliver its weights"):
            await session.weights(within_s=0.05)


async def test_an_engine_that_kept_the_previous_weights_goes_on_with_them_until_the_next_publication() -> None:
    state: dict[str, EngineError | None] = {}
    engines = [Breakable("a", breaks=state.get), Breakable("b", breaks=state.get)]
    async with pool_of(*engines) as pool:
        await published(pool, 1)
        state["update"] = PreviousWeightsKept("the learner died")
        await pool.receivers(2)
        with pytest.raises(WeightsWanted, match="the learner died"):
            await pool.update_weights(streamed(2))
        assert (await pool.generate([1], SAMPLING, request_id="0-0")).version_spans[0].version == 1
        assert pool.wants_weights and pool.metrics()["engine/ejections"] == 0
        state.clear()
        await published(pool, 2)
        assert {engine.version for engine in engines} == {2}


async def test_a_publication_that_all_engines_refuse_again_and_again_ends_the_run() -> None:
    kept = PreviousWeightsKept("another model's weights")
    engines = [Breakable(url, breaks=lambda what: kept if what == "update" else None) for url in "ab"]
    async with pool_of(*engines) as pool:
        with pytest.raises(WeightSyncError, match="no engine took version 1: another model"):
            await published(pool, 1)


async def test_engines_that_never_prove_streamed_weights_end_the_run() -> None:
    engines = [
        Breakable(url, breaks=lambda what: WeightSyncError("a checksum") if what == "update" else None) for url in "ab"
    ]
    async with pool_of(*engines) as pool:
        with pytest.raises(WeightSyncError, match="no engine"):
            await published(pool, 1)


async def test_a_publication_waits_for_an_engine_and_then_says_so() -> None:
    gone = EngineGone("dead")
    async with pool_of(
        Breakable("a", breaks=lambda what: gone if what != "enter" else None), return_timeout_s=0.1
    ) as pool:
        with pytest.raises(EngineError, match=r"no engine came back within 0.1 s: dead"):
            await pool.receivers(1)
