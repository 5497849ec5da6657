"""Shared by the buffer's tests: made-up groups, a journal that can be killed, and what must hold for every group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.buffer.journal import GroupState, Journal
from agentrl.testing import one_token_group
from agentrl.types import Task, TrajectoryGroup

Rewards = tuple[float, ...]
USEFUL, USELESS = (0.0, 1.0), (1.0, 1.0)
OUTSTANDING = (GroupState.IN_FLIGHT, GroupState.READY, GroupState.TRAINING)


class Crash(BaseException):
    """The process was killed here."""


class FusedJournal(Journal):
    """Dies at the n-th transaction from when the fuse was set: before it, as `kill -9` between two of them would."""

    fuse: int | None = None

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crash

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._burn()
        with super()._transaction():
            yield


def make_group(group_id: int, task: Task, *, version: int, rewards: Rewards) -> TrajectoryGroup:
    """A group of which one member began under `version` and the other one later."""
    return one_token_group(group_id, task=task, versions=(version, version + 1), rewards=rewards)


class Model:
    """What should be true of every group."""

    def __init__(self) -> None:
        self.states: dict[int, GroupState] = {}
        self.members: dict[GroupState, dict[int, None]] = {state: {} for state in GroupState}
        self.tasks: dict[int, Task] = {}
        self.since: dict[int, int] = {}  # version at admission; of the oldest token once it is finished

    def move(self, group_id: int, state: GroupState) -> None:
        """Exactly one state a group."""
        if group_id in self.states:
            del self.members[self.states[group_id]][group_id]
        self.states[group_id] = state
        self.members[state][group_id] = None

    def counts(self) -> dict[GroupState, int]:
        """Groups by state, where there are any."""
        return {state: len(members) for state, members in self.members.items() if members}

    def num_outstanding(self) -> int:
        """Groups that hold a slot."""
        return sum(len(self.members[state]) for state in OUTSTANDING)
