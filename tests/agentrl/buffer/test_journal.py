"""What the journal reads from other runs and other versions of agentrl."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from agentrl.buffer.journal import Journal
from agentrl.buffer.journal_format import FORMAT, StepState, StepTimes
from agentrl.errors import ConfigError, JournalError
from agentrl.testing import one_token_group


def format_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        ((found,),) = database.execute("PRAGMA user_version").fetchall()
    return int(found)


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal, pytest.raises(ConfigError, match="has no step 3"):
        journal.resume_at(3)


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal._db.execute("PRAGMA user_version=1")
    with pytest.raises(ConfigError, match=r"another version of agentrl \(format 1, this one reads 2, 3, 4, 5\)"):
        Journal(path)


def test_steps_that_only_the_learner_survived_are_named(tmp_path: Path) -> None:
    """The learner makes and saves a step while the one before it is being recorded."""
    groups = [one_token_group(index, versions=(0, 0)) for index in range(3)]
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        for index, group in enumerate(groups):
            journal.issued(index, group.task)
            journal.ready(group)
            journal.taken([index], step=index + 1)
        journal.step_made(1, StepState(ess_guard={}, train_s=1.0), resumable_from=None)
        assert journal.resume_at(3).unrecorded == {2: (groups[1],), 3: (groups[2],)}
        assert journal.resume_at(2).unrecorded == {2: (groups[1],)}
        assert journal.resume_at(1).unrecorded == {}


def test_steps_say_when_they_were_made_but_for_those_of_an_older_agentrl(tmp_path: Path) -> None:
    times = StepTimes(waited_at=1.0, taken_at=2.0, stepped_at=3.0, held_at=4.0)
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.step_made(1, StepState(ess_guard={}, train_s=1.0), resumable_from=None)
        old = msgspec.msgpack.encode({"ess_guard": {}, "train_s": 7.0})
        journal._db.execute("UPDATE steps SET state = ?", (old,))
        assert journal.train_s() == 7.0
        journal.step_made(2, StepState(ess_guard={}, train_s=8.0, times=times), resumable_from=None)
        assert journal.step_times() == {2: times}


def test_a_journal_whose_groups_have_no_episodes_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    ready = one_token_group(0, versions=(0, 0))
    flat = {"group_id": 0, "task": ready.task, "trajectories": ready.trajectories}
    with closing(Journal(path)) as journal:
        journal.issued(0, ready.task)
        journal.ready(ready)
        journal._db.execute("UPDATE groups SET payload = ?", (msgspec.msgpack.encode(flat),))
        journal._db.execute("PRAGMA user_version=2")
    with closing(Journal(path)) as journal:
        assert journal.resume_at(0).ready == (ready,)


def test_a_journal_of_an_older_format_keeps_it_until_the_first_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        journal._db.execute("PRAGMA user_version=2")
    with closing(Journal(path)) as journal:
        assert (journal.last_step(), journal.evaluations(), journal.counts()) == (0, [], {})
    assert format_of(path) == 2
    with closing(Journal(path)) as journal:
        with pytest.raises(JournalError, match="no such table"), journal._transaction():
            journal._db.execute("DELETE FROM no_such_table")
        assert format_of(path) == 2
        journal.issued(0, one_token_group(0, versions=(0, 0)).task)
    assert format_of(path) == FORMAT
