"""`read_run` on a run that is over, running, killed, old, or not there."""

from __future__ import annotations

import gzip
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

import agentrl
from agentrl.api.reading import EPISODE_COLUMNS, LEDGER_COLUMNS, METRIC_COLUMNS, Records, Run
from agentrl.buffer.journal import GroupState, Journal
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.run_folder import RunFolder
from agentrl.supervision.status import StatusFile
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with

OLD = Path(__file__).parents[1] / "old_trajectories.jsonl"


@pytest.fixture
async def run(tmp_path: Path, tokenizer: TurnTokenizer) -> Run:
    """Four steps of two groups of four, measured before, after two, and at the end."""
    await run_with(make_config(tmp_path), YesAndNo(tokenizer), tokenizer)
    return agentrl.read_run(tmp_path / "t")


async def test_a_run_is_read_as_records(run: Run) -> None:
    assert run.config["rollout"]["groups_per_step"] == 2
    steps = run.metrics()
    assert [row["step"] for row in steps] == steps.columns()["step"] == [1, 2, 3, 4]
    assert steps[-1]["ledger/trained"] == 8
    assert set(run.metrics(None).columns()["kind"]) == {"step", "eval", "event"}
    assert [result.policy_version for result in run.evaluations()] == [0, 2, 4]
    trained = [row for row in run.ledger() if row["state"] == "trained"]
    assert [row["step"] for row in trained] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(sorted(row["rewards"]) == [0, 0, 1, 1] for row in trained)


async def test_episodes_have_their_messages_rewards_and_versions(run: Run) -> None:
    assert run.steps() == [1, 2, 3, 4] and run.steps("eval") == [0, 2, 4]
    assert len(run.episodes()) == 4 * 8 and len(run.episodes("eval", step=0)) == 2 * 2
    (first, *_), (group, *_) = run.episodes(step=1), run.groups(1)
    assert (first["group_id"], first["episode_id"]) == (group.group_id, group.episodes[0].id)
    assert first["reward"] == first["rewards/correct"] == group.episodes[0].reward
    assert first["oldest_version"] == first["newest_version"] == 0
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    with pytest.raises(FileNotFoundError):
        run.episodes(step=9)


async def test_records_become_arrow_tables(run: Run) -> None:
    table = run.episodes(step=1).to_arrow()
    assert table.num_rows == 8 and table.column_names[: len(EPISODE_COLUMNS)] == list(EPISODE_COLUMNS)
    assert table["messages"][0].as_py()[0]["content"] == "Say yes."
    assert run.ledger().to_arrow()["rewards"][0].as_py() == run.ledger()[0]["rewards"]
    assert run.metrics(None).to_arrow().num_rows == len(run.metrics(None))


async def test_records_become_a_data_frame(run: Run) -> None:
    pandas = pytest.importorskip("pandas", reason="an extra: pip install 'agentrl-vcpo[pandas]'")
    frame = run.episodes().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.groupby("step").reward.mean().tolist() == [0.5] * 4
    assert list(Records([], METRIC_COLUMNS).to_pandas().columns) == list(METRIC_COLUMNS)


@pytest.mark.parametrize(
    ("package", "method", "extra"), [("pandas", "to_pandas", "pandas"), ("pyarrow", "to_arrow", "data")]
)
def test_without_a_package_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, method: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]"):
        getattr(Records([], METRIC_COLUMNS), method)()


def test_a_running_run_is_read_while_it_is_written_and_a_killed_one_afterwards(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = RunFolder.create(config.out_dir, config.name, config=config)
    run = agentrl.read_run(folder.path)
    assert list(run.metrics()) == list(run.episodes()) == list(run.ledger()) == run.evaluations() == []
    assert run.ledger().columns() == {name: [] for name in LEDGER_COLUMNS} and run.checkpoints() == {}
    with pytest.raises(ConfigError, match="has not started"):
        run.status()
    with closing(Journal(folder.journal)) as journal, StatusFile(folder.path, WaitGraph(), stall_timeout_s=60.0):
        journal.issued(0, Task(id="a", prompt="1 + 1"), version=3)
        assert [(row["task_id"], row["state"], row["admitted"]) for row in run.ledger()] == [("a", "in_flight", 3)]
        assert run.status().state == "running"
        journal.ended(0, GroupState.FAILED, "no sandbox")
        folder.metrics.write_text('{"kind": "step", "step": 1, "time_s": 1.0, "values": {"a": 2.0}}\n{"kind": "st')
        shutil.copytree(folder.path, tmp_path / "killed")  # what `kill -9` leaves: the writer has closed nothing
    killed = agentrl.read_run(tmp_path / "killed")
    before = killed.folder.journal.read_bytes()
    assert [(row["state"], row["reason"]) for row in killed.ledger()] == [("failed", "no sandbox")]
    assert killed.metrics().columns() == {"kind": ["step"], "step": [1], "time_s": [1.0], "a": [2.0]}
    assert killed.folder.journal.read_bytes() == before


async def test_reading_a_run_that_is_over_puts_nothing_into_its_folder(run: Run) -> None:
    before = sorted(run.path.rglob("*"))
    run.ledger(), run.evaluations(), run.metrics(), run.episodes()
    assert sorted(run.path.rglob("*")) == before


async def test_old_runs_are_read(run: Run) -> None:
    """Trajectories without episode ids, a journal of format 2, a config with keys that are gone."""
    (run.folder.trajectories / "train_000009.jsonl.gz").write_bytes(gzip.compress(OLD.read_bytes()))
    with closing(Journal(run.folder.journal)) as journal:
        journal._db.execute("PRAGMA user_version=2")
    run.folder.config.write_text('{"gone": 1}')
    old = agentrl.read_run(run.path)
    assert old.config == {"gone": 1} and len(old.ledger()) >= 8
    episodes = old.episodes(step=9)
    assert len(episodes) == len({row["episode_id"] for row in episodes}) > 0
    assert max(row["num_segments"] for row in episodes) > 1


def test_checkpoints_are_listed_by_name(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = RunFolder.create(config.out_dir, config.name, config=config)
    for name in ("step_10", "step_2", ".step_4.unfinished", "final", "states/v2"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "config.json").touch()
    found = agentrl.read_run(folder.path).checkpoints()
    assert list(found.items()) == [(name, folder.checkpoints / name) for name in ("step_2", "step_10", "final")]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        agentrl.read_run(tmp_path)
