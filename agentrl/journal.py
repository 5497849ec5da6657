"""Durable record of every group's fate (SQLite, WAL). Knows nothing of slots, lag or models.

A finished group is on disk before the buffer offers it to the learner, so `kill -9` of any process loses no finished
work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from agentrl import wire
from agentrl.types import TrajectoryGroup


class GroupState(StrEnum):
    """Every issued group is in exactly one of these."""

    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The run ended while it was in flight."""


_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  group_id INTEGER PRIMARY KEY, task_id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, payload BLOB
)"""


class Journal:
    """One row a group; the payload stays until the group was trained or dropped."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        # NORMAL survives a killed process; only a power cut can lose the last transactions, and never corrupts.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(_SCHEMA)

    def issued(self, group_id: int, task_id: str) -> None:
        """A group was admitted."""
        self._db.execute(
            "INSERT INTO groups (group_id, task_id, state) VALUES (?, ?, ?)", (group_id, task_id, GroupState.IN_FLIGHT)
        )

    def ready(self, group: TrajectoryGroup) -> None:
        """A group is finished: keep all of it."""
        self._db.execute(
            "UPDATE groups SET state = ?, payload = ? WHERE group_id = ?",
            (GroupState.READY, wire.encode(group), group.group_id),
        )

    def moved(self, group_id: int, state: GroupState, reason: str | None = None) -> None:
        """A group changed state; in a final state its payload is freed."""
        keep = state in (GroupState.READY, GroupState.TRAINING)
        self._db.execute(
            "UPDATE groups SET state = ?, reason = ?, payload = CASE WHEN ? THEN payload END WHERE group_id = ?",
            (state, reason, keep, group_id),
        )

    def unconsumed(self) -> Iterator[TrajectoryGroup]:
        """Finished groups that no committed step has used, oldest first."""
        rows = self._db.execute(
            "SELECT payload FROM groups WHERE state IN (?, ?) ORDER BY group_id",
            (GroupState.READY, GroupState.TRAINING),
        )
        for (payload,) in rows:
            yield wire.decode(payload, TrajectoryGroup)

    def counts(self) -> dict[GroupState, int]:
        """Groups by state."""
        rows = self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")
        return {GroupState(state): count for state, count in rows}

    def close(self) -> None:
        """Close the database."""
        self._db.close()
