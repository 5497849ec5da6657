"""When everything happened, from a run that really trained, and the same as a trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder
from agentrl.view import documents
from agentrl.view.export import export
from agentrl.view.run_reader import RunReader
from agentrl.view.timeline import Timeline, timeline_of
from agentrl.view.trace import LEARNER, states, trace_of


@pytest.fixture(scope="module")
def timeline(trained: RunFolder) -> Timeline:
    return timeline_of(RunReader(trained))


def test_each_episode_has_a_lane_in_the_order_of_what_it_did(timeline: Timeline, trained: RunFolder) -> None:
    assert len(timeline.lanes) == 4 * 8 + 3 * 4 and timeline.num_without_times == 0
    assert [lane.started for lane in timeline.lanes] == sorted(lane.started for lane in timeline.lanes)
    for lane in timeline.lanes:
        assert len(lane.generating) == 2  # one turn
        moments = (lane.started, *lane.generating, lane.played, lane.ready)
        assert list(moments) == sorted(moments)
        assert (lane.taken is None) == (lane.kind == "eval")
    ids = {episode.id for group in trained.read_trajectories(3) for episode in group.episodes}
    assert {lane.episode_id for lane in timeline.lanes if lane.kind == "train" and lane.step == 3} == ids


def test_steps_are_waited_for_taken_made_and_held(timeline: Timeline) -> None:
    assert [one.step for one in timeline.steps] == [1, 2, 3, 4]
    for one in timeline.steps:
        assert one.waited <= one.taken <= one.stepped <= one.held
        assert one.engine_busy is not None and one.since <= one.held
    for lane in timeline.lanes:
        if lane.taken is not None:
            assert lane.ready <= lane.taken + 0.002  # a group is finished before its batch is taken; of rounded numbers
    assert timeline.learner_idle is not None and 0 <= timeline.learner_idle <= 1
    assert timeline.engine_idle is not None and 0 <= timeline.engine_idle <= 1


def test_a_page_gets_the_newest_lanes(trained: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = documents.timeline(RunReader(trained))
    monkeypatch.setattr(documents, "MAX_LANES", 5)
    cut = documents.timeline(RunReader(trained))
    assert (whole["num_older"], cut["num_older"], cut["lanes"]["count"]) == (0, 39, 5)
    assert cut["lanes"]["columns"]["episode_id"] == whole["lanes"]["columns"]["episode_id"][-5:]


def test_the_states_of_a_lane_have_no_gaps(timeline: Timeline) -> None:
    for lane in timeline.lanes:
        for (_, _, end), (_, start, _) in pairwise(states(lane)):
            assert end == start


def test_a_trace_has_rows_in_which_nothing_overlaps(timeline: Timeline) -> None:
    events = json.loads(json.dumps(trace_of(timeline)))["traceEvents"]
    rows = defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        assert all(start >= end - 2_000 for (_, end), (start, _) in pairwise(sorted(spans)))
    assert [event["name"] for event in events if event["ph"] == "i"] == [f"version {n}" for n in (1, 2, 3, 4)]
    learner = [event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (LEARNER, 0)]
    assert learner[:2] == ["wait for batch", "step 1"]


def test_a_run_without_times_says_so(run: RunFolder, tmp_path: Path) -> None:
    for path in run.trajectories.iterdir():
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        for line in lines:
            del line["info"]["started_at"]
            for turn in line["turns"]:
                del turn["times"]
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    run.journal.unlink()
    old = timeline_of(RunReader(run))
    assert (old.lanes, old.steps, old.num_without_times) == ((), (), 44)
    with pytest.raises(ConfigError, match="an older agentrl"):
        export([RunReader(run)], "trace", tmp_path / "trace.json")


def test_the_command_writes_a_trace_of_one_run(trained: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["export", str(trained.path), "--to", "trace", "--out", str(target)])
    assert done.exit_code == 0 and "44 episodes, 4 steps" in done.stdout
    assert json.loads(target.read_text())["displayTimeUnit"] == "ms"
    with pytest.raises(ConfigError, match="one RUN"):
        export([RunReader(trained)], "trace", tmp_path / "b", where="reward>0")
