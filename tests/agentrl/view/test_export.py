"""`agentrl export`: what is written says what the run's files say, in each format, for the episodes that were asked."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.run_folder import RunFolder
from agentrl.testing import episode_of, with_members
from agentrl.types import Message, StopReason, ToolCall, Trajectory
from agentrl.view.export import Format, export
from agentrl.view.run_reader import RunReader


def exported(run: RunFolder, to: Format, target: Path, where: str = "") -> Path:
    return export([RunReader(run)], to, target, where=where, version="1").path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_tools(run: RunFolder) -> Trajectory:
    """Step 9: one group whose first episode called a tool and was cut into two segments."""
    group = run.read_trajectories(2)[0]
    call = ToolCall(id="c", name="python", arguments={"code": "print('é')", "n": [1]})
    first = group.trajectories[0]
    said = (*first.messages[:-1], Message(role="assistant", content="", tool_calls=(call,)))
    cut = replace(first, messages=(*said, Message(role="tool", content="é", tool_call_id="c")))
    rest = replace(first, id="rest", messages=(Message(role="tool", content="…", tool_call_id="gone"), *first.messages))
    members = [replace(episode_of(cut, rest), id=group.episodes[0].id), *group.episodes[1:]]
    run.write_trajectories(9, [with_members(group, members)])
    return cut


def test_rows_are_chosen_by_reward_stop_reason_and_environment(trained: RunFolder, tmp_path: Path) -> None:
    everything = lines(exported(trained, "jsonl", tmp_path / "all.jsonl"))
    assert len(everything) == 4 * 8 and {row["kind"] for row in everything} == {"train"}
    env = everything[0]["env"]
    right = lines(exported(trained, "jsonl", tmp_path / "a", f"reward>=1&stop_reason=completed&env={env}"))
    assert len(right) == 16 and {row["reward"] for row in right} == {1.0}
    assert right[0]["messages"] == [
        {"role": "user", "content": "Say yes."},
        {"role": "assistant", "content": "yes"},
    ]
    held_out = lines(exported(trained, "jsonl", tmp_path / "b", "kind=eval&step=4"))
    assert [row["episode_id"] for row in held_out] == [
        episode.id for group in trained.read_trajectories(4, kind="eval") for episode in group.episodes
    ]
    assert len(lines(exported(trained, "jsonl", tmp_path / "c", "limit=3"))) == 3


def test_a_row_keeps_calls_answers_and_segments(run: RunFolder, tmp_path: Path) -> None:
    with_tools(run)
    first, second, *_ = lines(exported(run, "jsonl", tmp_path / "a", "step=9"))
    assert (first["segment"], second["segment"], first["episode_id"]) == (0, 1, second["episode_id"])
    call, answer = first["messages"][-2:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"code": "print('é')", "n": [1]}
    assert answer == {"role": "tool", "content": "é", "tool_call_id": "c"}


def test_parquet_has_the_same_rows(run: RunFolder, tmp_path: Path) -> None:
    with_tools(run)
    rows = lines(exported(run, "jsonl", tmp_path / "a"))
    table = parquet.read_table(exported(run, "parquet", tmp_path / "a.parquet")).to_pylist()
    assert len(table) == len(rows) == 4 * 8 + 5
    for found, row in zip(table, rows, strict=True):
        assert dict(found.pop("rewards")) == row.pop("rewards")
        messages = [{key: value for key, value in one.items() if value is not None} for one in found.pop("messages")]
        assert messages == row.pop("messages") and found == row


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_atif_has_the_ids_and_logprobs_of_every_turn(trained: RunFolder, tmp_path: Path) -> None:
    found = {one["trajectory_id"]: one for one in documents(exported(trained, "atif", tmp_path / "a", "step=3"))}
    trajectories = [one for group in trained.read_trajectories(3) for one in group.trajectories]
    assert len(found) == len(trajectories) == 8
    for trajectory in trajectories:
        document, (turn,) = found[trajectory.id], trajectory.turns
        assert document["schema_version"] == "ATIF-v1.7" and document["agent"]["version"] == "1"
        question, answer = document["steps"]
        assert (question["step_id"], question["source"], answer["source"]) == (1, "user", "agent")
        metrics = answer["metrics"]
        assert tuple(metrics["prompt_token_ids"]) == turn.observation_ids
        assert tuple(metrics["completion_token_ids"]) == turn.completion.token_ids
        assert tuple(metrics["logprobs"]) == turn.completion.behavior_logprobs
        assert len(metrics["extra"]["policy_versions"]) == metrics["completion_tokens"] == len(metrics["logprobs"])
        assert datetime.fromisoformat(answer["timestamp"]).timestamp() == turn.completion.times[1]
        assert document["final_metrics"]["extra"]["reward"] == trajectory.reward


def test_atif_joins_calls_with_answers_and_segments_with_each_other(run: RunFolder, tmp_path: Path) -> None:
    cut = with_tools(run)
    folder = exported(run, "atif", tmp_path / "a", "step=9")
    (first,) = (one for one in documents(folder) if one["trajectory_id"] == cut.id)
    agent = first["steps"][-1]
    assert agent["tool_calls"] == [
        {"tool_call_id": "c", "function_name": "python", "arguments": {"code": "print('é')", "n": [1]}}
    ]
    assert agent["observation"] == {"results": [{"content": "é", "source_call_id": "c"}]}
    second = json.loads((folder / first["continued_trajectory_ref"]).read_text())
    assert second["trajectory_id"] == "rest" and second["session_id"] == first["session_id"]
    assert second["steps"][0] == {
        "step_id": 1,
        "source": "system",
        "message": "",
        "observation": {"results": [{"content": "…"}]},  # its call is in the other segment
    }


def test_two_runs_of_one_name_do_not_overwrite_each_other(trained: RunFolder, run: RunFolder, tmp_path: Path) -> None:
    readers = [RunReader(trained), RunReader(run)]
    assert readers[0].name == readers[1].name
    done = export(readers, "atif", tmp_path / "a", where="step=1")
    assert done.episodes == done.rows == len(list(done.path.iterdir())) == 2 * 8
    done = export(readers, "jsonl", tmp_path / "b", where="limit=40")
    assert len({(row["run"], row["step"], row["episode_id"]) for row in lines(done.path)}) == 40


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reward>=7", "none of 44 episodes passes 'reward>=7'"),
        ("rewad>=1", "Similar: reward"),
        ("reward>much", "no number"),
        ("sort=-reward", "sort and fields"),
    ],
)
def test_what_cannot_be_asked_writes_nothing(trained: RunFolder, tmp_path: Path, where: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        exported(trained, "jsonl", tmp_path / "a", where)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_there_or_cannot_be_written_is_refused(trained: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        exported(trained, "jsonl", tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot write"):
        exported(trained, "jsonl", tmp_path / "a" / "b")
    assert (tmp_path / "a").read_text() == "mine"


def test_parquet_without_pyarrow_names_the_extra(
    trained: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"\[data\]"):
        exported(trained, "parquet", tmp_path / "a")


def test_the_command_says_what_it_wrote_and_what_it_left_out(run: RunFolder, tmp_path: Path) -> None:
    file = run.trajectories / "train_000003.jsonl.gz"
    whole = gzip.decompress(file.read_bytes()).splitlines()
    file.write_bytes(gzip.compress(b"\n".join([b"{", *whole])))
    target = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["export", str(run.path), "--to", "jsonl", "--out", str(target)])
    assert done.exit_code == 0, done.output
    assert f"{target} (32 episodes, 32 rows)" in done.stdout and "train_000003.jsonl.gz, line 1" in done.stderr
    again = CliRunner().invoke(app, ["export", str(run.path), "--to", "jsonl", "--out", str(target)])
    assert again.exit_code == 2


def test_stop_reasons_are_the_words_of_the_filter(run: RunFolder, tmp_path: Path) -> None:
    group = run.read_trajectories(1)[0]
    run.write_trajectories(
        8, [with_members(group, [replace(one, stop_reason=StopReason.MAX_TURNS) for one in group.trajectories])]
    )
    assert len(lines(exported(run, "jsonl", tmp_path / "a", "stop_reason=max_turns"))) == 4
