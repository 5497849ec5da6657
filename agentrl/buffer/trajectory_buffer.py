"""The trajectory buffer: a bounded store between rollout and learner, with slots and the ledger.

A group holds a slot from its admission until the engines hold the weights that its step produced. staleness.py decides
how many slots there are and when a group is too old. The learner may be one version ahead of the engines, while they
take its weights: a group's age is counted from the learner's version, and slots are freed by the engines'. `set_lag`
admits with less lag for a while: groups admitted before stay, and are consumed under the bound they were admitted with.
Where the rule restarts groups (tail.py), a batch ends all others, and the next step plays with the next weights alone.
Independent of tokens and HTTP.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.buffer.journal import GroupState, Journal, Resumption
from agentrl.buffer.recent_signal import RecentSignal
from agentrl.buffer.replay import Replay
from agentrl.buffer.staleness import StalenessRule
from agentrl.buffer.tail import TailQueue
from agentrl.report.learning_signal import LearningSignal, signal_of
from agentrl.types import Batch, Task, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The number of issued groups in each state. Balances at every moment.

    Example: `assert buffer.ledger().balanced()`.
    """

    issued: int
    in_flight: int
    ready: int
    training: int
    trained: int
    dropped_stale: int
    dropped_zero_variance: int
    failed: int
    cancelled: int
    restarted: int

    def balanced(self) -> bool:
        """Whether issued is the sum of all other numbers."""
        parts = (self.in_flight, self.ready, self.training, self.trained, self.dropped_stale)
        others = (self.dropped_zero_variance, self.failed, self.cancelled, self.restarted)
        return self.issued == sum(parts) + sum(others)


@dataclass(frozen=True, slots=True)
class _InFlight:
    task: Task
    version: int  # at admission: a lower bound of every version the group will carry


@dataclass(frozen=True, slots=True)
class _Ready:
    group: TrajectoryGroup
    version: int  # its oldest


class TrajectoryBuffer:
    """Admits groups on one side and gives batches on the other.

    Args:
        rule: how many groups a step consumes, how old they may be, and what happens to those that get too old.
        journal: durable record of the groups' states.
        drop_zero_variance: drop groups of equal rewards (up to rounding) at once: a baseline leaves them no gradient.
        requeue: called with the task of a stale group when the rule says "requeue".
        lag: the lag of `set_lag` from the beginning; None: that of the rule.
        replay: adds groups of earlier batches to each batch; it has seen those of `resumed`. None: none are added.
        resumed: the work left in a run that resumes: `take` returns its batches first, unchanged.

    Example:
        group_id, task = await buffer.admit(tasks.draw)
        await buffer.finish(group)  # the group of this task
        batch = await buffer.take()
        await buffer.stepped(batch.policy_version + 1)  # once the learner made it: `take` gives the next batch
        await buffer.commit(batch.policy_version + 1)  # once the engines hold the new weights
    """

    def __init__(
        self,
        rule: StalenessRule,
        *,
        journal: Journal,
        drop_zero_variance: bool = True,
        requeue: Callable[[Task], None] = lambda task: None,
        lag: float | None = None,
        replay: Replay | None = None,
        resumed: Resumption | None = None,
    ) -> None:
        resumed = resumed or Resumption()
        self._rule = rule
        self.num_slots = rule.num_slots(lag)
        """The largest number of outstanding groups."""
        self._drop_zero_variance = drop_zero_variance
        self._requeue = requeue
        self._replay = replay
        self._journal = journal
        self._changed = asyncio.Condition()
        self._version = resumed.version  # of the engines
        self._learner_version = resumed.version
        self._again = deque(resumed.batches)
        self._goes_on_at = resumed.version + len(resumed.batches)  # no group is played before this version
        self._in_flight = {group_id: _InFlight(task, self._goes_on_at) for group_id, task in resumed.in_flight}
        self._ready = {group.group_id: _Ready(group, group.policy_version) for group in resumed.ready}
        self._ready_ids = sorted(self._ready)
        self._tail = _tail_queue(rule, resumed)
        self._ended: set[int] = set()  # restarted groups that are still played
        self._new_restarts: list[int] = []
        # The number of groups of each version, for the "wait" rule, which is checked whenever a group ends.
        self._num_flying = Counter(entry.version for entry in self._in_flight.values())
        self._num_ready = Counter(ready.version for ready in self._ready.values())
        self._training: dict[int, tuple[int, ...]] = {}  # ids of the groups of each step that is not committed
        self._counts = Counter(resumed.counts)
        self._num_issued = resumed.num_issued
        self._recent = RecentSignal(8 * self.num_slots)
        self._dropped_lengths: list[int] = []
        # The learner may have made a step that was never committed because the orchestrator died.
        self._drop_stale()

    async def caught_up(self) -> dict[int, Task]:
        """Wait until the resumed batches are trained again. Returns the groups that were in flight, to be played
        again."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= self._goes_on_at)
            return {group_id: entry.task for group_id, entry in self._in_flight.items()}

    async def admit(self, draw: Callable[[], tuple[Task, int]]) -> tuple[int, Task]:
        """Wait for a free slot, then draw a task for it. Returns the new group's id and the task.

        `draw` returns a task and the source's cursor (see the journal). No await lies between it and the journal entry,
        so a cancellation cannot lose a drawn task.
        """
        async with self._changed:
            await self._changed.wait_for(self._has_slot)
            again = self._tail.next() if self._tail is not None else None
            task, cursor = draw() if again is None else (again, 0)
            is_new = self._tail is not None and again is None  # a waiting task of this id still waits
            group_id = self._num_issued
            self._num_issued += 1
            self._in_flight[group_id] = _InFlight(task, self._version)
            self._num_flying[self._version] += 1
            self._journal.issued(group_id, task, version=self._version, cursor=cursor, is_new=is_new)
            return group_id, task

    async def finish(self, group: TrajectoryGroup) -> None:
        """A group is finished: offer it to the learner, or free its slot if it carries no gradient.

        Without effect for one that was restarted meanwhile, as `fail`.
        """
        async with self._changed:
            if not self._land(group.group_id):
                return
            signal = signal_of(group, needs_spread=self._drop_zero_variance)
            self._recent.add(signal)
            if not signal.useful:
                self._counts[GroupState.DROPPED_ZERO_VARIANCE] += 1
                self._journal.useless(group)
            else:
                self._journal.ready(group)
                self._offer(group)
                if self._learner_version - group.policy_version >= self._rule.bound:
                    self._drop_stale()
            self._changed.notify_all()

    async def fail(self, group_id: int, reason: str, *, state: GroupState = GroupState.FAILED) -> None:
        """A group could not be finished, for a reason other than the model."""
        async with self._changed:
            if self._land(group_id):
                self._close(group_id, state, reason)
                self._changed.notify_all()

    async def take(self) -> Batch:
        """Wait for a full batch of groups with lag <= max_lag, oldest first. Slots stay held until `commit`.

        After a resume, the batches from before come first; their lag was checked when they were put together.

        Raises NoLearningSignal when the last 8 * num_slots finished groups all had equal rewards.
        """
        async with self._changed:
            while not self._again and not self._batch_is_ready():
                await self._changed.wait()
            is_new = not self._again
            chosen = self._oldest() if is_new else self._again.popleft()
            step = self._learner_version + 1
            self._training[step] = tuple(group.group_id for group in chosen)
            self._journal.taken(self._training[step], step=step, restarted=self._restart_others() if is_new else ())
            groups, num_replayed = (chosen, 0) if self._replay is None else self._replay.batch(step, chosen)
            return Batch(
                policy_version=self._learner_version,
                max_lag=self._rule.largest_lag,
                groups=groups,
                num_replayed=num_replayed,
            )

    async def part(self, num_known: int) -> Batch:
        """Wait for more than `num_known` groups of the next batch, but not for all. They are in the order of finishing.

        Only at max_lag 0 without oversampling: then every group that is ready is in the next batch. `take` still gives
        the whole batch, and only then is it in the journal; a crash before that leaves these groups ready.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: num_known < self._num_partial() < self._rule.groups_per_step)
            groups = tuple(ready.group for ready in self._ready.values())
            return Batch(
                policy_version=self._learner_version,
                max_lag=self._rule.largest_lag,
                groups=groups,
                num_missing=self._rule.groups_per_step - len(groups),
            )

    async def stepped(self, policy_version: int) -> None:
        """The learner made `policy_version`, which the engines do not hold yet: `take` gives its batch.

        Slots stay held until `commit`, so no group is admitted under the old weights that would be too old in its turn:
        those that hold a slot and are not taken yet, max_lag * groups_per_step at most, are consumed before it.
        """
        async with self._changed:
            self._learner_version = policy_version
            self._drop_stale()
            self._changed.notify_all()

    async def commit(self, policy_version: int) -> None:
        """Every engine holds `policy_version`: mark the batch that made it as trained and free its slots."""
        async with self._changed:
            self._version = policy_version
            self._learner_version = max(self._learner_version, policy_version)
            for step in [step for step in self._training if step <= policy_version]:
                group_ids = self._training.pop(step)
                self._journal.trained(group_ids)
                self._counts[GroupState.TRAINED] += len(group_ids)
            self._num_flying, self._num_ready = +self._num_flying, +self._num_ready  # drops versions without groups
            self._drop_stale()
            if self._tail is not None and not self._outstanding():
                self._tail.begin()
            self._changed.notify_all()

    async def set_lag(self, lag: float) -> None:
        """From now on admit groups as if max_lag were `lag`. Raises ValueError outside [0, max_lag]."""
        num_slots = self._rule.num_slots(lag)
        async with self._changed:
            self.num_slots = num_slots
            self._changed.notify_all()

    @property
    def signal(self) -> LearningSignal:
        """Of the last 8 * num_slots finished groups of this attempt."""
        return self._recent.of_last

    @property
    def version(self) -> int:
        """The policy version in every engine."""
        return self._version

    def pop_signal(self) -> LearningSignal:
        """Of the groups that finished since the last call."""
        return self._recent.pop_new()

    def pop_restarted(self) -> list[int]:
        """Groups that were restarted since the last call: what still plays them can end."""
        group_ids, self._new_restarts = self._new_restarts, []
        return group_ids

    def pop_dropped_lengths(self) -> list[int]:
        """Action tokens of each trajectory dropped as stale since the last call: stale groups tend to be long ones."""
        lengths, self._dropped_lengths = self._dropped_lengths, []
        return lengths

    def ledger(self) -> Ledger:
        """A consistent snapshot."""
        return Ledger(
            issued=self._num_issued,
            in_flight=len(self._in_flight),
            ready=len(self._ready),
            training=self._num_training(),
            trained=self._counts[GroupState.TRAINED],
            dropped_stale=self._counts[GroupState.DROPPED_STALE],
            dropped_zero_variance=self._counts[GroupState.DROPPED_ZERO_VARIANCE],
            failed=self._counts[GroupState.FAILED],
            cancelled=self._counts[GroupState.CANCELLED],
            restarted=self._counts[GroupState.RESTARTED],
        )

    def _has_slot(self) -> bool:
        if self._tail is None:
            return self._outstanding() < self.num_slots
        # Nothing is played under weights that the learner replaces now: it could not be trained.
        return not self._num_training() and self._outstanding() < self._tail.num_slots(self.num_slots)

    def _restart_others(self) -> list[tuple[int, Task]]:
        """End the groups that the batch does not have: their ids and tasks. None unless the rule restarts groups."""
        if self._tail is None:
            return []
        flying = {group_id: entry.task for group_id, entry in self._in_flight.items()}
        others = flying | {group_id: self._ready[group_id].group.task for group_id in self._ready_ids}
        for group_id in flying:
            self._land(group_id)
        for group_id in list(self._ready_ids):
            self._withdraw(group_id)
        self._ended.update(flying)
        self._new_restarts.extend(flying)
        self._counts[GroupState.RESTARTED] += len(others)
        restarted = sorted(others.items())
        self._tail.put(task for _, task in restarted)
        return restarted

    def _land(self, group_id: int) -> bool:
        """The group is not in flight any more. False: it was restarted before."""
        if group_id in self._ended:
            self._ended.remove(group_id)
            return False
        self._num_flying[self._in_flight.pop(group_id).version] -= 1
        return True

    def _offer(self, group: TrajectoryGroup) -> None:
        self._ready[group.group_id] = _Ready(group, group.policy_version)
        insort(self._ready_ids, group.group_id)
        self._num_ready[group.policy_version] += 1

    def _withdraw(self, group_id: int) -> _Ready:
        self._ready_ids.remove(group_id)
        ready = self._ready.pop(group_id)
        self._num_ready[ready.version] -= 1
        return ready

    def _oldest(self) -> tuple[TrajectoryGroup, ...]:
        chosen = [self._withdraw(group_id) for group_id in self._next_ids()]
        for ready in chosen:
            self._rule.check(ready.group.group_id, ready.version, version=self._learner_version)
        return tuple(ready.group for ready in chosen)

    def _batch_is_ready(self) -> bool:
        if len(self._ready) >= self._rule.groups_per_step:
            return self._rule.on_stale != "wait" or not self._would_strand()
        self._recent.require_any()
        return False

    def _num_partial(self) -> int:
        """Groups that are ready for the next batch; 0 where that one is from before a resume, or was taken already."""
        is_known = bool(self._again) or self._learner_version + 1 in self._training
        return 0 if is_known else len(self._ready)

    def _next_ids(self) -> list[int]:
        return self._ready_ids[: self._rule.groups_per_step]

    def _would_strand(self) -> bool:
        """Whether a batch without the groups in flight would let some of them become stale."""
        left = self._num_ready.copy()
        left.subtract(self._ready[group_id].version for group_id in self._next_ids())
        return self._rule.would_strand(self._num_flying, left, version=self._learner_version)

    def _drop_stale(self) -> None:
        """Drop what no batch can have any more: too old now, or beyond the places that its age has in this batch."""
        num_oldest = 0
        for group_id in list(self._ready_ids):
            version = self._ready[group_id].version
            num_oldest += self._rule.is_oldest(version, version=self._learner_version)
            if self._rule.is_stale(version, version=self._learner_version):
                self._drop(group_id)
            elif num_oldest > self._rule.num_oldest:
                self._drop(group_id)
                num_oldest -= 1

    def _drop(self, group_id: int) -> None:
        group = self._withdraw(group_id).group
        again = group.task if self._rule.on_stale == "requeue" else None
        self._close(group_id, GroupState.DROPPED_STALE, again=again)
        self._dropped_lengths.extend(trajectory.num_action_tokens for trajectory in group.trajectories)
        if again is not None:
            self._requeue(again)

    def _close(self, group_id: int, state: GroupState, reason: str | None = None, *, again: Task | None = None) -> None:
        self._counts[state] += 1
        self._journal.ended(group_id, state, reason, again=again)

    def _outstanding(self) -> int:
        return len(self._in_flight) + len(self._ready) + self._num_training()

    def _num_training(self) -> int:
        return sum(map(len, self._training.values())) + sum(map(len, self._again))


def _tail_queue(rule: StalenessRule, resumed: Resumption) -> TailQueue | None:
    """The queue of a run whose rule restarts groups; None for others."""
    if not rule.restarts:
        return None
    queue = TailQueue(groups_per_step=rule.groups_per_step, waiting=resumed.waiting, is_long=resumed.in_long_step)
    if not (resumed.in_flight or resumed.ready):
        queue.begin()
    return queue
