import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import config
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder, write_atomically
from agentrl.testing import with_members
from agentrl.types import EpisodeRecord
from tests.agentrl.report.synthetic_run import Words, make_config, make_group


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", config=make_config())


def groups_of(num: int):
    rng, words = random.Random(1), Words()
    return [make_group(words, i, version=3, skill=0.5, rng=rng, size=2) for i in range(num)]


def test_a_second_run_of_the_name_gets_the_next_number(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path, "run", config=make_config()).path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_an_empty_folder_of_the_name_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunFolder.create(tmp_path, "run", config=make_config()).path.name == "run"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="plain folder name"):
        RunFolder.create(tmp_path, name, config=make_config())


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make a run folder"):
        RunFolder.create(tmp_path / "file", "run", config=make_config())


def test_the_saved_config_reads_back_equal(folder: RunFolder) -> None:
    assert config.parse(json.loads(folder.config.read_text()), source="saved") == make_config()


def test_open_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunFolder.open(tmp_path)


def test_a_name_is_looked_up_and_one_that_is_none_gets_the_similar_ones(tmp_path: Path) -> None:
    for name in ("quick", "other"):
        RunFolder.create(tmp_path, name, config=make_config())
    assert RunFolder.open("quick", out_dir=tmp_path).path == tmp_path / "quick"
    for wanted, said in (
        ("quik", rf"no run quik: neither here nor in {tmp_path}/. Similar: {tmp_path}/quick$"),
        ("zzz", rf"The newest: {tmp_path}/other, {tmp_path}/quick$"),
        (tmp_path / "gone", r"no run .*gone: there is no such folder"),
        (tmp_path / "quick" / "config.json", "is a file, and not the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=said):
            RunFolder.open(wanted, out_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"There is no run in .*nothing/ yet: `agentrl train CONFIG` makes one"):
        RunFolder.open("quick", out_dir=tmp_path / "nothing")


def test_trajectories_read_back_equal(folder: RunFolder) -> None:
    groups = groups_of(3)
    first, *others = groups[0].trajectories
    groups[0] = with_members(groups[0], (replace(first, weight=0.5), *others))
    folder.write_trajectories(12, groups)
    assert RunFolder.open(folder.path).read_trajectories(12) == groups


def test_a_line_has_one_entry_a_token_in_every_array(folder: RunFolder) -> None:
    path = folder.write_trajectories(12, groups_of(1), kind="eval")
    assert path.name == "eval_000012.jsonl.gz"
    with gzip.open(path) as lines:
        line = json.loads(next(iter(lines)))
    lengths = {len(line[key]) for key in ("token_ids", "action_mask", "behavior_logprobs", "policy_versions")}
    assert lengths == {sum(t["num_observation_tokens"] + t["num_action_tokens"] for t in line["turns"])}
    assert [version >= 0 for version in line["policy_versions"]] == [mask == 1 for mask in line["action_mask"]]


def test_steps_are_listed_by_kind_in_order(folder: RunFolder) -> None:
    for step in (10, 2):
        folder.write_trajectories(step, groups_of(1))
    folder.write_trajectories(0, groups_of(1), kind="eval")
    assert folder.trajectory_steps() == [2, 10]
    assert folder.trajectory_steps(kind="eval") == [0]


def test_held_out_sets_have_files_of_their_own(folder: RunFolder) -> None:
    for step, name in ((3, ""), (3, "a"), (0, "a_1"), (12, "a")):
        folder.write_trajectories(step, groups_of(1), kind="eval", set_name=name)
    assert folder.trajectory_sets() == ["a_1", "", "a"]
    assert folder.trajectory_steps(kind="eval") == [3] and folder.trajectory_steps() == []
    assert folder.trajectory_steps(kind="eval", set_name="a") == [3, 12]
    assert folder.trajectory_steps(kind="eval", set_name="a_1") == [0]
    assert folder.read_trajectories(12, kind="eval", set_name="a") == groups_of(1)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_segments_read_back_as_one_episode_also_from_a_file_without_episode_ids(folder: RunFolder) -> None:
    whole = groups_of(1)[0]
    first, *others = whole.trajectories
    segments = [replace(first, id=f"{first.id}.{number}", weight=0.5) for number in range(2)]
    forked = with_members(whole, [EpisodeRecord(id=first.id, segments=tuple(segments)), *others])
    path = folder.write_trajectories(12, [forked])
    assert folder.read_trajectories(12) == [forked]
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    old = [{key: value for key, value in line.items() if key != "episode_id"} for line in lines]
    path.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in old)))
    assert folder.read_trajectories(12) == [forked]


def test_a_file_of_an_agentrl_without_episode_ids_is_read(folder: RunFolder) -> None:
    old = (Path(__file__).parent / "old_trajectories.jsonl").read_bytes()
    (folder.trajectories / "train_000005.jsonl.gz").write_bytes(gzip.compress(old))
    (group,) = folder.read_trajectories(5)
    assert [episode.id for episode in group.episodes] == ["train-3-0", "train-3-1"]
    assert [len(episode.segments) for episode in group.episodes] == [2, 1]
    assert [trajectory.id for trajectory in group.trajectories] == ["train-3-0.0", "train-3-0.1", "train-3-1"]
    assert (group.episode_rewards, group.policy_version) == ([1.0, 0.0], 4)
    first = group.trajectories[0].turns[0].completion
    assert (first.token_ids, first.behavior_logprobs) == ((21, 22), (-0.5, -0.25))
    assert [(span.version, span.start, span.end) for span in first.version_spans] == [(4, 0, 1), (5, 1, 2)]
