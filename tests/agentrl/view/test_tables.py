"""The tables of `agentrl view --json`, on a run that is over, is being written, is damaged, or is old."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder
from agentrl.view.query import Query
from agentrl.view.run_reader import RunReader
from agentrl.view.tables import TABLES, ask

OLD = Path(__file__).parents[1] / "old_trajectories.jsonl"


def rows(run: RunFolder, query: str) -> list[dict[str, Any]]:
    return list(ask([RunReader(run)], query))


async def test_every_table_has_the_rows_of_the_run(run: RunFolder) -> None:
    (one,) = rows(run, "runs")
    assert (one["run"], one["steps"], one["num_steps"], one["eval_first"]) == ("t", 4, 4, 0.5)
    assert [row["step"] for row in rows(run, "steps")] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(run, "evals")] == [0, 2, 4]
    assert len(rows(run, "episodes?kind=train")) == 4 * 8 and len(rows(run, "episodes?kind=eval")) == 3 * 4
    assert [row["reward_mean"] for row in rows(run, "groups?step=1")] == [0.5, 0.5]
    assert {row["state"] for row in rows(run, "ledger?step>0")} == {"trained"}
    assert rows(run, "problems") == [{"run": "t", "problem": rows(run, "problems")[0]["problem"]}]
    assert "no tokenizer.json" in rows(run, "problems")[0]["problem"]  # the scripted engine has no model


async def test_an_episode_is_counted_weighed_and_dated(run: RunFolder) -> None:
    yes, no = (rows(run, f"episodes?step=3&kind=train&reward={reward}&limit=1")[0] for reward in (1, 0))
    assert (yes["above_mean"], no["above_mean"], yes["rewards/correct"]) == (0.5, -0.5, 1)
    assert yes["correct"] and not no["correct"] and (yes["final"], no["final"]) == ("yes", "no")
    assert yes["lag"] == 3 - 1 - yes["oldest_version"]
    assert (yes["turns"], yes["prompt"], yes["answer"]) == (1, "Say yes.", "yes")


async def test_messages_and_tokens_are_those_of_the_file(run: RunFolder) -> None:
    (group, _) = run.read_trajectories(2)
    trajectory = group.trajectories[1]
    where = f"episode_id={group.episodes[1].id}"
    assert [row["role"] for row in rows(run, f"messages?{where}")] == ["user", "assistant"]
    tokens = rows(run, f"tokens?{where}")
    assert [row["token_id"] for row in tokens] == trajectory.token_ids()
    assert [row["logprob"] or 0.0 for row in tokens] == trajectory.behavior_logprobs()
    assert [row["version"] for row in tokens if row["sampled"]] == [v for v in trajectory.policy_versions() if v >= 0]
    assert len(rows(run, "messages?step=2&kind=train")) == 2 * 8


async def test_conditions_order_limit_and_fields(run: RunFolder) -> None:
    assert {row["reward"] for row in rows(run, "episodes?reward<=0.5")} == {0.0}
    assert {row["kind"] for row in rows(run, "episodes?kind!=train")} == {"eval"}
    assert {row["final"] for row in rows(run, "episodes?final~YE")} == {"yes"}
    steps = [row["step"] for row in rows(run, "episodes?sort=-step&limit=9&kind=train")]
    assert steps == [4] * 8 + [3]
    assert rows(run, "episodes?limit=1&fields=step,reward")[0].keys() == {"step", "reward"}
    assert rows(run, "ledger?reason=null&limit=1")
    assert rows(run, "episodes?correct=true") and rows(run, "episodes?lag=nothing") == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("epsodes", "Similar: episodes"),
        ("episodes?rewad=1", "Similar: reward"),
        ("episodes?reward<much", "no number"),
        ("episodes?reward", "no condition"),
        ("episodes?limit=-1", "limit=-1"),
    ],
)
async def test_a_question_that_cannot_be_answered_says_why(run: RunFolder, query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rows(run, query)


def test_percent_signs_and_and_signs_can_be_written() -> None:
    (condition,) = Query.parse("episodes?final~a%26b").conditions
    assert (condition.sign, condition.value) == ("~", "a&b")


def said_by(run: RunFolder) -> Iterator[str]:
    return (row["problem"] for row in rows(run, "problems") if "tokenizer" not in row["problem"])


async def test_a_run_that_is_being_written_grows(run: RunFolder) -> None:
    reader = RunReader(run)
    before = len(list(ask([reader], "episodes")))
    assert reader.index.refresh() is False
    run.write_trajectories(5, run.read_trajectories(4))
    with run.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 5, "time')
    assert len(list(ask([reader], "episodes"))) == before + 8
    assert [row["step"] for row in ask([reader], "steps")] == [1, 2, 3, 4]
    (problem,) = said_by(run)
    assert "half a line" in problem


async def test_what_is_damaged_is_named_and_the_rest_is_shown(run: RunFolder) -> None:
    cut = run.trajectories / "train_000002.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-40])
    lines = gzip.decompress((run.trajectories / "train_000003.jsonl.gz").read_bytes()).splitlines()
    bad = [lines[0], b'{"group_id": "a"', *lines[1:], b""]
    (run.trajectories / "train_000003.jsonl.gz").write_bytes(gzip.compress(b"\n".join(bad)))
    (run.trajectories / "train_000004.jsonl.gz").write_bytes(b"no gzip")
    (run.trajectories / "train_x.jsonl.gz").write_bytes(b"")
    run.metrics.write_text('{"kind": "step", "step": 1, "time_s": 1, "values": {"a": NaN}}\n[]\n')
    run.journal.write_bytes(b"no database at all, but long enough")
    run.config.write_text("{")
    for name in TABLES:
        if name != "messages":
            rows(run, name)
    assert [row["step"] for row in rows(run, "episodes?kind=train&fields=step")].count(3) == 8
    problems = "\n".join(said_by(run))
    for word in ("config.json", "line 1", "line 2", "000002", "000003.jsonl.gz, line 2", "000004", "ledger"):
        assert word in problems


async def test_a_damaged_row_of_the_journal_is_named(run: RunFolder) -> None:
    with sqlite3.connect(run.journal) as journal:
        journal.execute("UPDATE groups SET rewards = x'c1' WHERE group_id = 1")
    journal.close()
    assert rows(run, "ledger") == [] and "the ledger is not shown" in "\n".join(said_by(run))


async def test_what_is_missing_is_named(run: RunFolder) -> None:
    run.metrics.unlink()
    for path in (*run.path.glob("journal.sqlite*"), *run.trajectories.iterdir(), run.path / "status.json"):
        path.unlink(missing_ok=True)
    problems = "\n".join(said_by(run))
    assert "metrics.jsonl is missing" in problems and "journal.sqlite is missing" in problems
    (one,) = rows(run, "runs")
    assert one["state"] == "unknown" and rows(run, "episodes") == rows(run, "steps") == []


async def test_older_formats_are_read_or_refused_by_name(run: RunFolder) -> None:
    (run.trajectories / "train_000009.jsonl.gz").write_bytes(gzip.compress(OLD.read_bytes()))
    old = rows(run, "episodes?step=9")
    assert {row["episode_id"] for row in old} == {"train-3-0", "train-3-1"}
    assert rows(run, f"messages?episode_id={old[0]['episode_id']}")
    with sqlite3.connect(run.journal) as journal:
        journal.execute("PRAGMA user_version=99")
    journal.close()
    assert "another version of agentrl" in "\n".join(said_by(run))


async def test_the_command_prints_a_json_object_a_line(run: RunFolder) -> None:
    result = CliRunner().invoke(app, ["view", str(run.path), "--json", "episodes?limit=3"])
    assert result.exit_code == 0
    assert [json.loads(line)["run"] for line in result.stdout.splitlines()] == ["t"] * 3


async def test_tables_of_several_runs_name_the_run(run: RunFolder) -> None:
    twice = [RunReader(run), RunReader(run)]
    assert [row["run"] for row in ask(twice, "runs")] == ["t", "t"]
