"""Which command starts the learner's ranks, and which hostfiles are refused before anything is started."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from agentrl.config import LearnerConfig, load
from agentrl.config.hostfile import Host, read_hostfile
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.supervision.child import Spot
from agentrl.training.launch_ranks import check_hosts, launcher, token_file

HERE = socket.gethostname()
ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "configs" / "cluster"


def settings(tmp_path: Path, text: str, *, num_ranks: int = 2) -> LearnerConfig:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return LearnerConfig(num_ranks=num_ranks, hostfile=str(path))


def test_one_rank_is_a_plain_process() -> None:
    assert launcher(LearnerConfig(), token_file=None) == [sys.executable, "-m", "trainer"]


def test_a_trainer_folder_in_the_working_directory_is_not_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launcher(LearnerConfig(), token_file=None) == [sys.executable, "-P", "-m", "trainer"]
    monkeypatch.syspath_prepend(tmp_path)
    assert launcher(LearnerConfig(), token_file=None) == [sys.executable, "-m", "trainer"]


def test_several_on_this_machine_are_torchruns() -> None:
    command = launcher(LearnerConfig(num_ranks=3), token_file=None)
    assert command[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--module", "trainer")
    ]


def test_each_node_that_ray_gives_has_a_torchrun_with_its_part_of_the_ranks() -> None:
    spot = Spot(host="10.0.0.4", port=7000, machine=1, meeting="10.0.0.3:7001")
    command = launcher(LearnerConfig(num_ranks=16), token_file=None, spot=spot, machines=2)
    assert command[1:] == [
        *("-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.3"),
        *("--master-port=7001", "--nproc-per-node=8", "--module", "trainer"),
    ]


def test_those_of_a_hostfile_are_told_where_the_token_lies(tmp_path: Path) -> None:
    command = launcher(settings(tmp_path, "localhost slots=2"), token_file=tmp_path / "token")
    assert command[-3:] == ["trainer", "--token-file", str(tmp_path / "token")]


def test_the_token_is_in_a_file_for_its_owner_alone_and_goes_with_the_block(tmp_path: Path) -> None:
    with token_file(tmp_path, "secret") as path:
        assert path.is_absolute() and path.read_text() == "secret"
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_token_that_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "learner.token").write_text("old")
    with token_file(tmp_path, "new") as path:
        assert path.read_text() == "new"


def test_a_hostfile_has_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two machines\n\nnode-1 slots=8\n  node-2   slots=4  \n")
    assert read_hostfile(path) == [Host(name="node-1", num_ranks=8), Host(name="node-2", num_ranks=4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no machine"),
        ("node-1 slots=8\nnode-2 slot=8", "hostfile:2: 'node-2 slot=8': write each machine once, as `name slots=8`"),
        ("node-1 slots=8\n\nnode-1 slots=8", "hostfile:3"),
        ("node-1 slots=0", "hostfile:1"),
        ("localhost slots=8", r"has 8 slots and learner\.num_ranks=2: make them equal"),
        ("192.0.2.7 slots=2", "begins with 192.0.2.7, which is not this machine"),
        ("no-such-node.invalid slots=2", "begins with no-such-node.invalid, which is not this machine"),
        (
            "localhost slots=1\nnode-2 slots=1",
            "begins with localhost, which the other machines would resolve to themselves",
        ),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_hosts(settings(tmp_path, text))


def test_a_hostfile_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"learner\.hostfile: cannot read no/hostfile: No such file"):
        check_hosts(LearnerConfig(hostfile="no/hostfile"))


def test_several_machines_need_pdsh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"names 2 machines.*apt-get install pdsh openssh-client"):
        check_hosts(settings(tmp_path, f"{HERE} slots=1\nnode-2 slots=1"))


def test_several_machines_need_the_token_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pdsh", "ssh"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="AGENTRL_TOKEN_FILE: ssh does not pass the token on"):
        launcher(settings(tmp_path, f"{HERE} slots=1\nnode-2 slots=1"), token_file=None)


def test_the_shipped_cluster_files_fit_each_other() -> None:
    config = load(CLUSTER / "aime.yaml")
    hosts = read_hostfile(ROOT / (config.learner.hostfile or ""))
    assert sum(host.num_ranks for host in hosts) == config.learner.num_ranks
    # What stands in there stands in command lines.
    assert not re.search("token|secret|key|password", (CLUSTER / "deepspeed_env").read_text(), re.IGNORECASE)
