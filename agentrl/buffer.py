"""Bounded store between rollout and learner: slots, the staleness rule, the ledger. Knows nothing of tokens or HTTP.

A group holds a slot from admission until the engines hold the weights that its step produced. There are
`(max_lag + 1) * groups_per_step` slots, derived and not tuned: consumed oldest first, everything outstanding when a
group is admitted is used up within `max_lag` further steps, so a group that finishes in turn is never born stale. One
that is overtaken while it still runs can become stale; `on_stale` says what happens then. max_lag = 0 is exactly
synchronous. `set_lag` makes admission work with less lag for a while: what was admitted before stays, and is consumed
under the bound that it was admitted with.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import NoLearningSignal, StaleTrajectoryError
from agentrl.journal import GroupState, Journal
from agentrl.types import Batch, Task, TrajectoryGroup

OnStale = Literal["drop", "requeue", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every issued group is. Balances at every moment."""

    issued: int
    in_flight: int
    ready: int
    training: int
    trained: int
    dropped_stale: int
    dropped_zero_variance: int
    failed: int
    cancelled: int

    def balanced(self) -> bool:
        """Issued = everything else."""
        parts = (self.in_flight, self.ready, self.training, self.trained, self.dropped_stale)
        return self.issued == sum(parts) + self.dropped_zero_variance + self.failed + self.cancelled


@dataclass(frozen=True, slots=True)
class _InFlight:
    task: Task
    version: int  # at admission: a lower bound of every version the group will carry


class TrajectoryBuffer:
    """Admission on one side, batches on the other.

    Args:
        groups_per_step: groups an optimizer step consumes.
        max_lag: largest allowed lag, in policy versions.
        on_stale: what happens to a group that got too old (see the config).
        journal: durable record of the groups' states.
        drop_zero_variance: free groups whose rewards are all equal at once: a baseline leaves them no gradient.
        requeue: called with the task of a stale group when on_stale is "requeue".
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: int,
        journal: Journal,
        on_stale: OnStale = "drop",
        drop_zero_variance: bool = True,
        requeue: Callable[[Task], None] = lambda task: None,
    ) -> None:
        self.num_slots = (max_lag + 1) * groups_per_step
        """Groups that may be outstanding for another one to be admitted."""
        self._groups_per_step = groups_per_step
        self._max_lag = max_lag
        self._on_stale = on_stale
        self._drop_zero_variance = drop_zero_variance
        self._requeue = requeue
        self._journal = journal
        self._changed = asyncio.Condition()
        self._version = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._ready: dict[int, TrajectoryGroup] = {}
        self._training: dict[int, TrajectoryGroup] = {}
        self._counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        self._num_issued = 0
        # A run in which no group carries signal would otherwise wait for ever (or spin) without a word.
        self._recent_useless: deque[float] = deque(maxlen=8 * self.num_slots)
        self._dropped_lengths: list[int] = []

    async def admit(self, task: Task) -> int:
        """Wait for a free slot, take it for `task`, and return the new group's id."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._outstanding() < self.num_slots)
            group_id = self._num_issued
            self._num_issued += 1
            self._in_flight[group_id] = _InFlight(task, self._version)
            self._journal.issued(group_id, task.id)
            return group_id

    async def finish(self, group: TrajectoryGroup) -> None:
        """A group's episodes are done: offer it to the learner, or free its slot if it carries no gradient."""
        async with self._changed:
            del self._in_flight[group.group_id]
            rewards_G = group.rewards_G
            if self._drop_zero_variance and min(rewards_G) == max(rewards_G):
                self._recent_useless.append(rewards_G[0])
                self._close(group.group_id, GroupState.DROPPED_ZERO_VARIANCE)
            else:
                self._recent_useless.clear()
                self._journal.ready(group)
                self._ready[group.group_id] = group
                self._drop_stale()
            self._changed.notify_all()

    async def fail(self, group_id: int, reason: str, *, state: GroupState = GroupState.FAILED) -> None:
        """A group could not be finished, for a reason that is not the model's."""
        async with self._changed:
            del self._in_flight[group_id]
            self._close(group_id, state, reason)
            self._changed.notify_all()

    async def take(self) -> Batch:
        """Wait for a full batch of groups with lag <= max_lag, oldest first. Slots stay held until `commit`.

        Raises NoLearningSignal when so many groups in a row had equal rewards that waiting on is pointless.
        """
        async with self._changed:
            while not self._batch_is_ready():
                await self._changed.wait()
            chosen = [self._ready.pop(i) for i in sorted(self._ready)[: self._groups_per_step]]
            for group in chosen:
                if (lag := self._version - group.policy_version) > self._max_lag:
                    raise StaleTrajectoryError(f"group {group.group_id} has lag {lag}, allowed is {self._max_lag}")
                self._training[group.group_id] = group
                self._journal.moved(group.group_id, GroupState.TRAINING)
            return Batch(policy_version=self._version, max_lag=self._max_lag, groups=tuple(chosen))

    async def commit(self, policy_version: int) -> None:
        """Every engine holds `policy_version`: the batch that made it is trained, its slots are free."""
        async with self._changed:
            self._version = policy_version
            for group_id in list(self._training):
                del self._training[group_id]
                self._close(group_id, GroupState.TRAINED)
            self._drop_stale()
            self._changed.notify_all()

    async def set_lag(self, lag: int) -> None:
        """Admit from now on as if max_lag were `lag`. Raises ValueError outside [0, max_lag]."""
        if not 0 <= lag <= self._max_lag:
            raise ValueError(f"lag {lag} is outside [0, {self._max_lag}]")
        async with self._changed:
            self.num_slots = (lag + 1) * self._groups_per_step
            self._changed.notify_all()

    @property
    def version(self) -> int:
        """The policy version that every engine holds."""
        return self._version

    def pop_dropped_lengths(self) -> list[int]:
        """Action tokens of each trajectory dropped as stale since the last call: dropping stale is dropping long."""
        lengths, self._dropped_lengths = self._dropped_lengths, []
        return lengths

    def ledger(self) -> Ledger:
        """A consistent snapshot."""
        return Ledger(
            issued=self._num_issued,
            in_flight=len(self._in_flight),
            ready=len(self._ready),
            training=len(self._training),
            trained=self._counts[GroupState.TRAINED],
            dropped_stale=self._counts[GroupState.DROPPED_STALE],
            dropped_zero_variance=self._counts[GroupState.DROPPED_ZERO_VARIANCE],
            failed=self._counts[GroupState.FAILED],
            cancelled=self._counts[GroupState.CANCELLED],
        )

    def _batch_is_ready(self) -> bool:
        if len(self._recent_useless) == self._recent_useless.maxlen:
            mean = sum(self._recent_useless) / len(self._recent_useless)
            raise NoLearningSignal(
                f"the last {len(self._recent_useless)} groups each had equal rewards (mean {mean:.2f}): there is "
                + ("nothing left to learn here" if mean > 0.5 else "no success to learn from; use easier tasks")
            )
        if self._on_stale == "wait" and any(
            self._version - entry.version >= self._max_lag for entry in self._in_flight.values()
        ):
            return False
        return len(self._ready) >= self._groups_per_step

    def _drop_stale(self) -> None:
        for group_id, group in list(self._ready.items()):
            if self._version - group.policy_version > self._max_lag:
                del self._ready[group_id]
                self._close(group_id, GroupState.DROPPED_STALE)
                self._dropped_lengths.extend(t.num_action_tokens for t in group.trajectories)
                if self._on_stale == "requeue":
                    self._requeue(group.task)

    def _close(self, group_id: int, state: GroupState, reason: str | None = None) -> None:
        self._counts[state] += 1
        self._journal.moved(group_id, state, reason)

    def _outstanding(self) -> int:
        return len(self._in_flight) + len(self._ready) + len(self._training)
