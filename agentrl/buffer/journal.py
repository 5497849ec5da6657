"""The journal: a durable record of each group's state (SQLite, WAL), from which a run resumes after a crash.

A finished group is on disk before the buffer offers it to the learner, and a batch before the learner can take it, so
`kill -9` of any process loses no finished work. A learner that returns at an older version gets the batches after it
again, exactly as they were: no finished group is generated twice, and none is trained twice in the same weights.
Independent of slots and models.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from agentrl.buffer.journal_format import (
    FORMAT,
    OLD_FORMATS,
    StepState,
    StepTimes,
    decode,
    decode_evaluations,
    decode_group,
    encode,
)
from agentrl.errors import ConfigError, JournalError, boundary
from agentrl.report.statistics import EvalResult
from agentrl.types import Task, TrajectoryGroup


class GroupState(StrEnum):
    """Each issued group is in exactly one of these states. Example: `journal.counts()[GroupState.TRAINED]`."""

    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The run ended while it was in flight; it is played again when the run resumes."""
    RESTARTED = "restarted"
    """A step began without it (tail.py); its task is played again, as another group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The work that is left when a run resumes. Empty for a new run. Example: `journal.resume_at(version).batches`."""

    version: int = 0  # of the learner
    num_issued: int = 0
    counts: dict[GroupState, int] = field(default_factory=dict)  # of the final states
    batches: tuple[tuple[TrajectoryGroup, ...], ...] = ()
    """Of steps version+1, version+2, ...: to be trained again unchanged."""
    ready: tuple[TrajectoryGroup, ...] = ()
    in_flight: tuple[tuple[int, Task], ...] = ()  # group id and task: to be played again
    waiting: tuple[Task, ...] = ()  # see TailQueue, as the next
    in_long_step: bool = False
    state: StepState | None = None  # of step `version`, or the newest known before it
    trained: tuple[TrajectoryGroup, ...] = ()  # see Journal.trained_until; at `version`
    unrecorded: dict[int, tuple[TrajectoryGroup, ...]] = field(default_factory=dict)
    """New groups of steps up to `version` that only the learner survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The rewards of a finished group. Example: `Outcome(group_id=7, task_id="a", admitted=3, rewards=(0.0, 1.0))`."""

    group_id: int
    task_id: str
    admitted: int  # version at its admission
    rewards: tuple[float, ...]  # one per episode


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHistory:
    """How far the task source was read. Example: `VersionedTaskSource(source, journal.source_history())`."""

    cursor: int  # rows drawn
    outcomes: tuple[Outcome, ...]  # by group id
    returned: tuple[Task, ...]  # to be drawn again


_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  group_id INTEGER PRIMARY KEY, task_id TEXT NOT NULL, task BLOB NOT NULL, cursor INTEGER NOT NULL,
  admitted INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER, reason TEXT, rewards BLOB, payload BLOB
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE TABLE IF NOT EXISTS returned (id INTEGER PRIMARY KEY, task_id TEXT NOT NULL, task BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (policy_version INTEGER PRIMARY KEY, result BLOB NOT NULL);
"""

_NEWEST = "groups WHERE step <= ? ORDER BY step DESC, group_id DESC LIMIT ?"

_MARK_FORMAT = f"PRAGMA user_version={FORMAT}"

_FINAL = tuple(set(GroupState) - {GroupState.IN_FLIGHT, GroupState.READY, GroupState.TRAINING})


class Journal:
    """One row per group. The payload stays until the group is dropped, or trained and covered by a learner checkpoint.

    Raises JournalError where the disk fails, ConfigError at construction for a file of another version of agentrl.
    `read_only`: the file must exist, and is not changed, also while a run writes it. `keep_trained`: this many groups,
    the newest of each version that a learner can return to, stay to be trained again.

    Example: `with closing(Journal(run.journal)) as journal: print(journal.counts())`.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False, keep_trained: int = 0) -> None:
        self._path = path
        self._keep_trained = keep_trained
        with self._boundary("opening"):
            if read_only:
                self._db = sqlite3.connect(_read_only(Path(path)), uri=True, isolation_level=None)
            else:
                self._db = sqlite3.connect(path, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                # NORMAL survives a killed process; only a power cut can lose the last transactions, and never corrupts.
                self._db.execute("PRAGMA synchronous=NORMAL")
            self._is_current = self._check_format() == FORMAT

    # The states of a group, in order.

    def issued(self, group_id: int, task: Task, *, version: int = 0, cursor: int = 0, is_new: bool = False) -> None:
        """Record that a group was admitted at `version`.

        `cursor`: rows drawn from the source by then; 0 for a task that waited for a long step (tail.py). `is_new`: the
        task is none of those that are to be drawn again, also where one of them has its id.
        """
        row = (group_id, task.id, encode(task), cursor, version, GroupState.IN_FLIGHT)
        with self._transaction():
            self._db.execute(
                "INSERT INTO groups (group_id, task_id, task, cursor, admitted, state) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            if not is_new:
                self._db.execute(
                    "DELETE FROM returned WHERE id = (SELECT MIN(id) FROM returned WHERE task_id = ?)", (task.id,)
                )

    def ready(self, group: TrajectoryGroup) -> None:
        """Record a finished group, with all its tokens."""
        self._execute(
            "UPDATE groups SET state = ?, rewards = ?, payload = ? WHERE group_id = ?",
            (GroupState.READY, encode(group.episode_rewards), encode(group), group.group_id),
        )

    def useless(self, group: TrajectoryGroup) -> None:
        """Record a finished group that carries no gradient, with its rewards only."""
        self._execute(
            "UPDATE groups SET state = ?, rewards = ? WHERE group_id = ?",
            (GroupState.DROPPED_ZERO_VARIANCE, encode(group.episode_rewards), group.group_id),
        )

    def taken(self, group_ids: Sequence[int], *, step: int, restarted: Sequence[tuple[int, Task]] = ()) -> None:
        """Record that these groups are the batch of version `step`. `restarted`: groups that end without being trained,
        each with its task, which is to be drawn again."""
        with self._transaction():
            for group_id, task in restarted:
                self._end(group_id, GroupState.RESTARTED, None, again=task)
            self._db.executemany(
                "UPDATE groups SET state = ?, step = ? WHERE group_id = ?",
                [(GroupState.TRAINING, step, group_id) for group_id in group_ids],
            )

    def trained(self, group_ids: Sequence[int]) -> None:
        """Record that their step was made. The payloads stay until `step_made` reports a checkpoint that covers
        them."""
        with self._transaction():
            self._db.executemany(
                "UPDATE groups SET state = ? WHERE group_id = ?",
                [(GroupState.TRAINED, group_id) for group_id in group_ids],
            )

    def ended(self, group_id: int, state: GroupState, reason: str | None = None, *, again: Task | None = None) -> None:
        """Record that a group ended without being trained, and free its payload. `again`: its task, to be drawn
        again."""
        with self._transaction():
            self._end(group_id, state, reason, again=again)

    # Other state of a run.

    def step_made(self, step: int, state: StepState, *, resumable_from: int | None) -> None:
        """Record that the engines hold version `step`; free the batches up to the checkpoint `resumable_from`."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO steps (step, state) VALUES (?, ?)", (step, encode(state)))
            if resumable_from is not None:
                self._db.execute(
                    "UPDATE groups SET payload = NULL WHERE step <= ? AND payload IS NOT NULL AND group_id NOT IN ("
                    f"SELECT group_id FROM {_NEWEST})",
                    (resumable_from, resumable_from, self._keep_trained),
                )

    def evaluated(self, result: EvalResult) -> None:
        """Record a held-out measurement of one set, in the place of an earlier one of the same version."""
        version = result.policy_version
        with self._transaction():
            rows = self._rows("SELECT result FROM evaluations WHERE policy_version = ?", (version,))
            known = decode_evaluations(rows[0][0]) if rows else ()
            others = [one for one in known if one.set_name != result.set_name]
            self._db.execute(
                "INSERT OR REPLACE INTO evaluations (policy_version, result) VALUES (?, ?)",
                (version, encode((*others, result))),
            )

    # Reading, to resume.

    def evaluations(self) -> list[EvalResult]:
        """All measurements, the oldest policy version first; of one version, in the order in which they were made."""
        rows = self._rows("SELECT result FROM evaluations ORDER BY policy_version")
        return [one for (results,) in rows for one in decode_evaluations(results)]

    def source_history(self) -> SourceHistory:
        """What the task source needs to continue where it was."""
        ((cursor,),) = self._rows("SELECT COALESCE(MAX(cursor), 0) FROM groups")
        finished = self._rows(
            "SELECT group_id, task_id, admitted, rewards FROM groups WHERE rewards IS NOT NULL ORDER BY group_id"
        )
        return SourceHistory(
            cursor=cursor,
            outcomes=tuple(
                Outcome(group_id=i, task_id=task_id, admitted=at, rewards=decode(rewards, tuple[float, ...]))
                for i, task_id, at, rewards in finished
            ),
            returned=self._returned(),
        )

    def resume_at(self, version: int) -> Resumption:
        """The work that is left from the learner's `version` on.

        Raises ConfigError where the batches between `version` and the last step are missing.
        """
        self._check_known(version)
        with self._transaction():
            move = "UPDATE groups SET state = ? WHERE state = ?"
            self._db.execute(f"{move} AND step <= ?", (GroupState.TRAINED, GroupState.TRAINING, version))
            self._db.execute(f"{move} AND step > ?", (GroupState.TRAINING, GroupState.TRAINED, version))
            self._db.execute(move, (GroupState.IN_FLIGHT, GroupState.CANCELLED))
        ((num_issued,),) = self._rows("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups")
        in_flight = self._of_state(GroupState.IN_FLIGHT, "group_id, task")
        known = self._rows("SELECT step, state FROM steps WHERE step <= ? ORDER BY step DESC LIMIT 1", (version,))
        recorded = known[0][0] if known else 0
        # The learner may make and save a step while the one before it is recorded.
        may_be_lost = range(max(recorded, version - 2) + 1, version + 1)
        return Resumption(
            version=version,
            num_issued=num_issued,
            counts={state: count for state, count in self.counts().items() if state in _FINAL},
            batches=self._batches_after(version),
            ready=tuple(decode_group(payload) for (payload,) in self._of_state(GroupState.READY, "payload")),
            in_flight=tuple((group_id, decode(task, Task)) for group_id, task in in_flight),
            waiting=self._returned(),
            in_long_step=self._is_in_long_step(),
            state=decode(known[0][1], StepState) if known else None,
            trained=self.trained_until(version),
            unrecorded={step: groups for step in may_be_lost if (groups := self._batch(step))},
        )

    def trained_until(self, version: int) -> tuple[TrajectoryGroup, ...]:
        """The newest `keep_trained` groups of the batches up to the one of `version`, oldest batch first."""
        rows = self._rows(f"SELECT payload FROM {_NEWEST}", (version, self._keep_trained))
        return tuple(decode_group(payload) for (payload,) in reversed(rows) if payload is not None)

    def counts(self) -> dict[GroupState, int]:
        """Groups by state."""
        return {
            GroupState(state): count for state, count in self._rows("SELECT state, COUNT(*) FROM groups GROUP BY 1")
        }

    def ledger(self) -> Iterator[tuple[int, str, str, int, int | None, str | None, list[float] | None]]:
        """Of each group: id, task id, state, version at its admission, step of its batch, reason, rewards."""
        for *row, rewards in self._rows(
            "SELECT group_id, task_id, state, admitted, step, reason, rewards FROM groups ORDER BY group_id"
        ):
            yield (*row, None if rewards is None else decode(rewards, list[float]))

    def last_step(self) -> int:
        """The newest version whose step was recorded."""
        ((step,),) = self._rows("SELECT COALESCE(MAX(step), 0) FROM steps")
        return int(step)

    def train_s(self) -> float:
        """Seconds spent training up to `last_step`."""
        rows = self._rows("SELECT state FROM steps ORDER BY step DESC LIMIT 1")
        return decode(rows[0][0], StepState).train_s if rows else 0.0

    def step_times(self) -> dict[int, StepTimes]:
        """Of each step that has them."""
        states = ((step, decode(state, StepState)) for step, state in self._rows("SELECT step, state FROM steps"))
        return {step: state.times for step, state in states if state.times is not None}

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _check_format(self) -> int:
        """The format of the file; a new one is given its tables. Raises ConfigError for a format that is not read."""
        if not self._db.execute("SELECT 1 FROM sqlite_master").fetchall():
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {_MARK_FORMAT}; COMMIT")
        ((found,),) = self._db.execute("PRAGMA user_version").fetchall()
        if found not in (FORMAT, *OLD_FORMATS):
            formats = ", ".join(map(str, sorted((FORMAT, *OLD_FORMATS))))
            raise ConfigError(
                f"{self._path} was written by another version of agentrl (format {found}, this one reads {formats}): "
                "start a new run, if you like from the weights that the old one exported (model.path)"
            )
        return int(found)

    def _check_known(self, version: int) -> None:
        if version > 0 and not self._rows("SELECT 1 FROM groups WHERE step = ? LIMIT 1", (version,)):
            raise ConfigError(
                f"{self._path} has no step {version}, the version of the learner's checkpoint: the journal and "
                "checkpoints/states are not from one run; restore the run folder"
            )

    def _batches_after(self, version: int) -> tuple[tuple[TrajectoryGroup, ...], ...]:
        rows = self._rows(
            "SELECT step, payload FROM groups WHERE state = ? ORDER BY step, group_id", (GroupState.TRAINING,)
        )
        by_step = {step: [payload for _, payload in members] for step, members in groupby(rows, key=lambda row: row[0])}
        missing = [step for step in range(version + 1, max(by_step, default=version) + 1) if step not in by_step]
        missing += [step for step, payloads in by_step.items() if None in payloads]
        if missing:
            raise ConfigError(
                f"{self._path} no longer holds the batch of step {missing[0]}, and the learner is at version "
                f"{version}: its newer checkpoints in checkpoints/states are gone; restore them, or start a new run"
            )
        return tuple(tuple(decode_group(payload) for payload in by_step[step]) for step in sorted(by_step))

    def _batch(self, step: int) -> tuple[TrajectoryGroup, ...]:
        rows = self._rows("SELECT payload FROM groups WHERE step = ? ORDER BY group_id", (step,))
        return tuple(decode_group(payload) for (payload,) in rows if payload is not None)

    def _end(self, group_id: int, state: GroupState, reason: str | None, *, again: Task | None) -> None:
        self._db.execute(
            "UPDATE groups SET state = ?, reason = ?, payload = NULL WHERE group_id = ?", (state, reason, group_id)
        )
        if again is not None:
            self._db.execute("INSERT INTO returned (task_id, task) VALUES (?, ?)", (again.id, encode(again)))

    def _returned(self) -> tuple[Task, ...]:
        return tuple(decode(task, Task) for (task,) in self._rows("SELECT task FROM returned ORDER BY id"))

    def _is_in_long_step(self) -> bool:
        """Whether a group that is played, or that waits for its batch, has a task that waited for a long step."""
        states = (GroupState.IN_FLIGHT, GroupState.READY)
        return bool(self._rows("SELECT 1 FROM groups WHERE cursor = 0 AND state IN (?, ?) LIMIT 1", states))

    def _of_state(self, state: GroupState, columns: str) -> list[Any]:
        return self._rows(f"SELECT {columns} FROM groups WHERE state = ? ORDER BY group_id", (state,))

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        with self._boundary("reading"):
            return self._db.execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Sequence[object]) -> None:
        with self._transaction():
            self._db.execute(statement, values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._boundary("writing"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if not self._is_current:  # only now: a file that is merely read stays as the older agentrl left it
                    self._db.execute(_MARK_FORMAT)
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            self._is_current = True

    @contextmanager
    def _boundary(self, what: str) -> Iterator[None]:
        try:
            with boundary(JournalError, f"{what} the run's journal {self._path}"):
                yield
        except JournalError as error:
            if isinstance(error.__cause__, sqlite3.OperationalError):
                raise JournalError(
                    f"{error}. Free space on its disk (df -h {self._path}), then continue with "
                    f"agentrl train --resume {Path(self._path).parent}"
                ) from error.__cause__
            raise


def _read_only(path: Path) -> str:
    """The address of the file for SQLite. Without a log beside it nobody writes, and nothing is put beside it."""
    is_written = path.with_name(path.name + "-wal").exists()
    return f"{path.resolve().as_uri()}?mode=ro{'' if is_written else '&immutable=1'}"
