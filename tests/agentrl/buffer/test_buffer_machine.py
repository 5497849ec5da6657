"""The buffer and its journal under arbitrary interleavings, failures, latencies, stops and crashes: a state machine.

Each rule is something that orchestrator, engines, learner or `kill -9` can do next. After each the model, the ledger
and the journal on disk must tell the same story; at the end whatever is left must come to more steps.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentrl.buffer.journal import GroupState
from agentrl.buffer.journal_format import StepState
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.trajectory_buffer import TrajectoryBuffer
from agentrl.config.rollout import OnStale
from agentrl.errors import NoLearningSignal
from agentrl.types import Batch, Task, TrajectoryGroup
from tests.agentrl.buffer.buffer_model import USEFUL, USELESS, Crash, FusedJournal, Model, Rewards, make_group

STATE = StepState(ess_guard={}, train_s=0.0)
ENDING = st.tuples(st.integers(0, 999), st.floats(0, 1), st.sampled_from([USEFUL, USEFUL, USEFUL, USELESS]))


class BufferMachine(RuleBasedStateMachine):
    """The orchestrator's part is played by the rules, in any order."""

    on_stale: OnStale = "drop"
    restarts = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        in_memory = Path("/dev/shm")  # a database that is closed hundreds of times waits for a disk each time
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-machine-", dir=in_memory if in_memory.is_dir() else None))

    @initialize(max_lag=st.sampled_from([0, 0.5, 1, 1, 1.4, 2, 2.5, 3, 5, 16, 128]), groups_per_step=st.integers(1, 3))
    def begin(self, max_lag: float, groups_per_step: int) -> None:
        self.max_lag, self.n = 0 if self.restarts else max_lag, groups_per_step
        self.oversample = 2 if self.restarts or (self.on_stale == "finish" and not max_lag) else 1
        self.rule = StalenessRule(
            groups_per_step=self.n,
            max_lag=self.max_lag,
            on_stale=self.on_stale,
            oversample=self.oversample,
            restarts=self.restarts,
        )
        self.waiting: deque[Task] = deque()  # for a long step
        self.is_long = False
        self.came_from_waiting: set[int] = set()
        self.kept = self.version = self.goes_on_at = self.num_fresh = self.num_useless = 0
        self.model = Model()
        self.batches: dict[int, tuple[TrajectoryGroup, ...]] = {}  # by step, as they were first taken
        self.training: int | None = None
        self.returned: deque[Task] = deque()
        self.start(resume_at=None)

    def start(self, *, resume_at: int | None) -> None:
        """A new process on the same file."""
        self.journal = FusedJournal(self.folder / "journal.sqlite")
        self.buffer = TrajectoryBuffer(
            self.rule,
            journal=self.journal,
            requeue=lambda task: self.returned.append(task),
            resumed=None if resume_at is None else self.journal.resume_at(resume_at),
        )
        self.lag = self.max_lag
        self.asking: asyncio.Task[tuple[int, Task]] | None = None
        self.taking: asyncio.Task[Batch] | None = None

    # What can happen.

    @precondition(lambda self: self.asking is None and self.is_caught_up)
    @rule(count=st.integers(1, 20))
    def ask(self, count: int = 1) -> None:
        """The rollouts want slots for the next tasks, one after the other."""
        for _ in range(count):
            if self.asking is None:
                self.asking = self.loop.create_task(self.buffer.admit(self.draw))
                self.settle()

    @precondition(lambda self: self.in_flight and self.is_caught_up)
    @rule(endings=st.lists(ENDING, min_size=1, max_size=8))
    def finish(self, endings: list[tuple[int, float, Rewards]]) -> None:
        """Groups end, after any time, their first tokens sampled under any version since their admission."""
        for pick, late, rewards in endings:
            if self.in_flight:
                group_id = self.in_flight[pick % len(self.in_flight)]
                since = self.model.since[group_id]
                self.end(group_id, since + round(late * (self.version - since)), rewards)

    @precondition(lambda self: self.in_flight and self.is_caught_up)
    @rule(pick=st.integers(0, 999))
    def fail(self, pick: int) -> None:
        """A group's infrastructure fails."""
        group_id = self.in_flight[pick % len(self.in_flight)]
        self.model.move(group_id, GroupState.FAILED)
        self.do(self.buffer.fail(group_id, "sandbox gone"))

    @precondition(lambda self: self.taking is None and self.training is None)
    @rule()
    def take(self) -> None:
        """The training loop wants a batch."""
        self.taking = self.loop.create_task(self.buffer.take())
        self.settle()

    @precondition(lambda self: self.training is not None)
    @rule(makes_checkpoint=st.booleans())
    def commit(self, makes_checkpoint: bool) -> None:
        """The learner made its step and the engines hold the weights."""
        self.expect_commit()
        self.do(self.buffer.commit(self.version))
        self.kept = self.version if makes_checkpoint else self.kept
        self.journal.step_made(self.version, STATE, resumable_from=self.kept)

    @precondition(lambda self: self.is_caught_up)
    @rule(count=st.integers(1, 40), seed=st.integers(0, 2**16), tail=st.sampled_from([0.0, 0.5, 0.9]))
    def live(self, count: int, seed: int, tail: float) -> None:
        """A while of everyday life. `tail`: how likely the group that ends is one of the youngest."""
        rng = random.Random(seed)
        for _ in range(count * (1 + int(self.max_lag) // 8)):
            draw = rng.random()
            if self.training is not None and draw < 0.3:
                self.commit(False)
            elif self.taking is None and self.training is None:
                self.take()
            elif self.asking is None:
                self.ask()
            elif self.in_flight and draw < 0.05:
                self.fail(rng.randrange(1000))
            elif self.in_flight:
                young = self.in_flight[-self.n - 1 :] if rng.random() < tail else self.in_flight
                group_id, rewards = rng.choice(young), USELESS if draw > 0.85 else USEFUL
                self.end(group_id, rng.randint(self.model.since[group_id], self.version), rewards)

    @precondition(lambda self: self.is_caught_up)
    @rule(share=st.floats(0.1, 1))
    def overtake(self, share: float) -> None:
        """Groups admitted from now on are quick; what is in flight stays there, as far as the buffer lets it."""
        slow = set(self.in_flight)
        for _ in range(round(share * (self.max_lag + 2))):
            self.one_step(slow)

    @precondition(lambda self: self.is_caught_up and self.max_lag < 4)
    @rule(share=st.floats(0.2, 1.1))
    def drought(self, share: float) -> None:
        """Group after group with equal rewards."""
        for _ in range(round(share * self.patience)):
            if self.asking is None:
                self.ask()
            if self.in_flight:
                self.end(self.in_flight[-1], self.version, USELESS)

    @rule(share=st.floats(0, 1), gives_up=st.booleans())
    def change_of_mind(self, share: float, gives_up: bool) -> None:
        """The ESS guard moves admission; the training loop has waited long enough for a batch."""
        if gives_up and self.taking:
            self.taking.cancel()
            self.taking = None
        self.lag = share * self.max_lag
        self.do(self.buffer.set_lag(self.lag))

    @rule(behind=st.integers(0, 3), how=st.sampled_from(["killed", "killed after a checkpoint", "stopped"]))
    def crash(self, behind: int, how: str) -> None:
        """The run goes on from its folder; the learner from its checkpoint, or from any later version."""
        if how == "killed after a checkpoint":
            if self.training is None and self.taking is None:
                self.take()
            if self.training is not None:
                self.expect_commit()
                self.kept = self.version
        elif how == "stopped" and self.is_caught_up:
            self.cancel_waiting()
            for group_id in self.in_flight:
                self.model.move(group_id, GroupState.CANCELLED)
                self.do(self.buffer.fail(group_id, "the run ended", state=GroupState.CANCELLED))
            self.check_ledger()
        self.come_back(max(self.kept, self.version - behind))

    @precondition(lambda self: self.is_caught_up)
    @rule(fuse=st.integers(0, 2), what=st.sampled_from(["ask", "finish", "take", "commit"]))
    def crash_inside(self, fuse: int, what: str) -> None:
        """`kill -9` between two transactions of one thing; what was not written yet did not happen."""
        before, version, training = dict(self.model.states), self.version, self.training
        self.journal.fuse = fuse
        try:
            if what == "finish" and self.in_flight:
                self.end(self.in_flight[0], self.model.since[self.in_flight[0]])
            elif what == "ask" and self.asking is None:
                self.ask()
            elif what == "take" and self.taking is None and training is None:
                self.take()
            elif what == "commit" and training is not None:
                self.commit(False)
        except Crash:
            self.adopt(before)
            self.version, self.training = version, training
        self.come_back(max(self.kept, self.version))

    # What must hold.

    @invariant()
    def check(self) -> None:
        """The model, the ledger and the journal agree, and every wait has a reason."""
        if not hasattr(self, "buffer"):
            return
        self.check_ledger()
        self.check_tasks()
        if self.is_caught_up:
            assert self.model.num_outstanding() <= self.slots(self.max_lag)
        if self.asking and not (self.restarts and self.model.members[GroupState.TRAINING]):
            assert self.model.num_outstanding() >= self.slots(self.lag), "a slot is free and a task waits"
        if self.restarts:
            self.check_restarts()
        if self.taking and self.has_batch:
            assert self.on_stale == "wait" and self.in_flight, "a batch is ready and the learner waits"
        elif self.taking:
            assert self.num_useless < self.patience, "nothing can be learned and the learner waits"
        assert self.on_stale not in ("wait", "finish") or not self.model.members[GroupState.DROPPED_STALE]

    def check_ledger(self) -> None:
        ledger, counts = self.buffer.ledger(), self.model.counts()
        assert ledger.balanced() and ledger.issued == len(self.model.states)
        assert {state: number for state in GroupState if (number := getattr(ledger, state))} == counts
        assert self.journal.counts() == counts
        assert self.buffer.version == self.version

    def check_tasks(self) -> None:
        """Every task is asked once, and once more for each time that it was too old and is to be asked again."""
        asked = Counter(task.id for task in (*self.model.tasks.values(), *self.returned, *self.waiting))
        again = Counter(self.model.tasks[group_id].id for group_id in self.model.members[GroupState.RESTARTED])
        if self.on_stale == "requeue":
            again.update(self.model.tasks[group_id].id for group_id in self.model.members[GroupState.DROPPED_STALE])
        assert asked == Counter(f"t{i}" for i in range(self.num_fresh)) + again

    def check_restarts(self) -> None:
        """No group is older than the present weights, none is played while a step is made, and the rest is on disk."""
        groups = [*self.model.members[GroupState.IN_FLIGHT], *self.model.members[GroupState.READY]]
        if self.is_caught_up:
            assert all(self.model.since[group_id] == self.version for group_id in groups)
            assert not (groups and self.model.members[GroupState.TRAINING])
        assert self.journal.source_history().returned == tuple(self.waiting)

    def teardown(self) -> None:
        """From wherever it stands, the run comes to two more steps."""
        try:
            if hasattr(self, "buffer") and sys.exc_info()[0] is None:
                self.one_step(set())
                self.one_step(set())
                self.check()
        finally:
            if hasattr(self, "buffer"):
                self.cancel_waiting()
                self.journal.close()
            self.loop.close()
            shutil.rmtree(self.folder)

    # The machine's own parts.

    @property
    def in_flight(self) -> list[int]:
        return [*self.model.members[GroupState.IN_FLIGHT]]

    @property
    def is_caught_up(self) -> bool:
        return self.version >= self.goes_on_at

    @property
    def has_batch(self) -> bool:
        return len(self.model.members[GroupState.READY]) >= self.n

    @property
    def patience(self) -> int:
        """Groups without signal in a row after which a run ends."""
        return 8 * self.rule.num_slots()

    def slots(self, lag: float) -> int:
        if self.is_long:
            return self.n
        return max(int((lag + 1) * self.n), self.oversample * self.n)

    def draw(self) -> tuple[Task, int]:
        if self.returned:
            return self.returned.popleft(), self.num_fresh
        self.num_fresh += 1
        return Task(id=f"t{self.num_fresh - 1}", prompt="?"), self.num_fresh

    def end(self, group_id: int, version: int, rewards: Rewards = USEFUL) -> None:
        group = make_group(group_id, self.model.tasks[group_id], version=version, rewards=rewards)
        self.model.since[group_id] = version
        self.num_useless = self.num_useless + 1 if rewards == USELESS else 0
        self.model.move(group_id, GroupState.DROPPED_ZERO_VARIANCE if rewards == USELESS else GroupState.READY)
        self.expect_drops()
        self.do(self.buffer.finish(group))

    def do(self, what: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(what)
        self.settle()

    def settle(self) -> None:
        """Let everybody who can go on, go on; then look who came through."""

        async def turns() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        if self.asking and self.asking.done():
            asking, self.asking = self.asking, None
            group_id, task = asking.result()
            assert group_id == len(self.model.states)
            self.model.move(group_id, GroupState.IN_FLIGHT)
            self.model.tasks[group_id], self.model.since[group_id] = task, self.version
            if self.is_long and self.waiting:
                assert task == self.waiting.popleft(), "a long step plays the tasks that waited longest"
                self.came_from_waiting.add(group_id)
        if self.taking and self.taking.done():
            taking, self.taking = self.taking, None
            if isinstance(taking.exception(), NoLearningSignal):
                assert self.num_useless >= self.patience
            else:
                self.taken(taking.result())

    def taken(self, batch: Batch) -> None:
        """A batch came: full, in time, oldest first, never trained before; after a crash the same as before it."""
        self.training = self.version + 1
        assert batch.policy_version == self.version and len(batch.groups) == self.n
        lags = [self.version - group.policy_version for group in batch.groups]
        bound = math.ceil(self.max_lag)
        assert self.on_stale == "finish" or max(lags) <= bound
        if self.on_stale != "finish" and bound > self.max_lag:  # ROLL's share of the oldest: int(n * (alpha mod 1))
            assert lags.count(bound) <= int(self.n * (self.max_lag - bound + 1))
        if self.training <= self.goes_on_at:
            assert batch.groups == self.batches[self.training]
        else:
            ready = sorted(self.model.members[GroupState.READY])
            assert [group.group_id for group in batch.groups] == ready[: self.n]
            self.batches[self.training] = batch.groups
        for group in batch.groups:
            self.model.move(group.group_id, GroupState.TRAINING)
        if self.restarts and self.training > self.goes_on_at:
            self.expect_restarts()

    def expect_restarts(self) -> None:
        """All that the batch does not have ends, and its tasks wait in the order of admission."""
        others = sorted([*self.in_flight, *self.model.members[GroupState.READY]])
        assert sorted(self.buffer.pop_restarted()) == sorted(self.in_flight)
        for group_id in others:
            self.model.move(group_id, GroupState.RESTARTED)
            self.waiting.append(self.model.tasks[group_id])

    def expect_step(self) -> None:
        """A step begins with nothing outstanding: long where enough tasks wait."""
        if self.restarts and not self.model.num_outstanding():
            self.is_long = len(self.waiting) >= self.n

    def expect_commit(self) -> None:
        assert self.training
        for group in self.batches[self.training]:
            self.model.move(group.group_id, GroupState.TRAINED)
        self.version, self.training = self.training, None
        self.expect_drops()
        self.expect_step()

    def expect_drops(self) -> None:
        bound, num_oldest = math.ceil(self.max_lag), 0
        places = self.n if bound == self.max_lag else int(self.n * (self.max_lag - bound + 1))
        for group_id in sorted(self.model.members[GroupState.READY]):
            lag = self.version - self.model.since[group_id]
            is_surplus = places < self.n and lag == bound and num_oldest == places
            num_oldest += lag == bound and not is_surplus
            if self.on_stale != "finish" and (lag > bound or is_surplus):
                self.model.move(group_id, GroupState.DROPPED_STALE)

    def adopt(self, before: dict[int, GroupState]) -> None:
        """What the file says of the groups that were being moved: before it, after it, or on the way."""
        with sqlite3.connect(self.folder / "journal.sqlite") as db:
            rows = db.execute("SELECT group_id, state FROM groups").fetchall()
        for group_id, state in rows:
            after = self.model.states.get(group_id)
            on_the_way = GroupState.READY if after is GroupState.DROPPED_STALE else after
            assert state in (before.get(group_id), after, on_the_way)
            self.model.move(group_id, GroupState(state))

    def cancel_waiting(self) -> None:
        """Whoever waits for a slot or a batch stops."""
        for waiting in (self.asking, self.taking):
            if waiting:
                waiting.cancel()
        self.asking = self.taking = None
        self.loop.run_until_complete(asyncio.sleep(0))

    def come_back(self, learner_version: int) -> None:
        """Everything in memory is gone; the learner stands at this version."""
        self.cancel_waiting()
        self.journal.close()
        self.version, self.training, self.num_useless = learner_version, None, 0
        self.goes_on_at = max([learner_version, *self.batches])
        for step, groups in self.batches.items():
            for group in groups:
                self.model.move(group.group_id, GroupState.TRAINED if step <= learner_version else GroupState.TRAINING)
        for group_id in [*self.in_flight, *self.model.members[GroupState.CANCELLED]]:
            self.model.move(group_id, GroupState.IN_FLIGHT)
            self.model.since[group_id] = self.goes_on_at
        self.expect_drops()
        self.start(resume_at=learner_version)
        history = self.journal.source_history()
        self.num_fresh, self.returned = history.cursor, deque(history.returned)
        if self.restarts:  # see check_restarts
            self.waiting, self.returned = self.returned, deque()
            outstanding = {*self.in_flight, *self.model.members[GroupState.READY]}
            is_new = not outstanding
            self.is_long = len(self.waiting) >= self.n if is_new else bool(outstanding & self.came_from_waiting)

    def one_step(self, slow: set[int]) -> None:
        """Everybody does what they can until the next version is there; the slow ones end when all wait for them."""
        goal = self.version + 1
        for _ in range(self.patience + 8):
            if self.version >= goal:
                return
            if self.training is not None:
                self.commit(False)
            elif self.taking is None and (self.num_useless < self.patience or self.has_batch):
                self.take()
            else:
                if self.asking is None:
                    self.ask()
                quick = [group_id for group_id in self.in_flight if group_id not in slow] or self.in_flight
                assert quick, "everybody waits and nothing is in flight"
                self.end(quick[-1], self.model.since[quick[-1]])
        raise AssertionError("no step came")


@pytest.mark.parametrize("rule_name", ["drop", "requeue", "wait", "finish", "restart"])
def test_lag_ledger_journal_and_progress_hold_under_any_interleaving(rule_name: str) -> None:
    restarts = rule_name == "restart"
    on_stale = "drop" if restarts else rule_name
    machine = type(f"{rule_name.title()}Machine", (BufferMachine,), {"on_stale": on_stale, "restarts": restarts})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15 if on_stale == "finish" or restarts else 30,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )
