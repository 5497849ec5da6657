"""DeepSpeed's launcher with a hostfile of two machines: the commands that it would run there over ssh."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from agentrl.config import LearnerConfig
from agentrl.training.launch_ranks import launcher, token_file

TOKEN = "a-secret-of-the-run"
RECORDER = """#!/bin/sh
printf '%s\\n' "$0 $*" >> {log}
"""


def test_two_machines_are_reached_by_pdsh_with_the_token_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, log = tmp_path / "bin", tmp_path / "commands"
    programs.mkdir()
    for name in ("pdsh", "ssh"):
        (programs / name).write_text(RECORDER.format(log=log))
        (programs / name).chmod(0o755)
    here, hostfile = socket.gethostname(), tmp_path / "hostfile"
    hostfile.write_text(f"{here} slots=2\nnode-2 slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth7\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("AGENTRL_TOKEN", TOKEN)
    with token_file(tmp_path, TOKEN) as path:
        start = launcher(LearnerConfig(num_ranks=3, hostfile=str(hostfile)), token_file=path)
        subprocess.run([*start, "--config", "c.json"], cwd=tmp_path, check=True, timeout=60)
    check, command = log.read_text().splitlines()
    assert check.endswith(f"ssh -o PasswordAuthentication=no {here} hostname")
    assert f"-w {here},node-2" in command and "--node_rank=%n" in command and f"--master_addr={here}" in command
    assert "export GLOO_SOCKET_IFNAME=eth7;" in command and f"cd {tmp_path};" in command
    assert command.endswith(f" trainer --token-file {path} --config c.json")
    assert TOKEN not in check + command


@pytest.mark.slow
def test_it_numbers_the_gpus_of_its_ranks_itself_whatever_the_mask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is why placement.py gives ranks of a hostfile GPUs 0, 1, ... and refuses another mask."""
    hostfile, masks = tmp_path / "hostfile", tmp_path / "masks"
    masks.mkdir()
    hostfile.write_text("localhost slots=2\n")
    program = "import os, pathlib; env = os.environ\n"
    program += f"pathlib.Path({str(masks)!r}, env['LOCAL_RANK']).write_text(env['CUDA_VISIBLE_DEVICES'])\n"
    (tmp_path / "shown_mask.py").write_text(program)
    for name, value in {"CUDA_VISIBLE_DEVICES": "4,5", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    start = launcher(LearnerConfig(num_ranks=2, hostfile=str(hostfile)), token_file=None)
    assert start[-1] == "trainer"
    subprocess.run([*start[:-1], "shown_mask"], cwd=tmp_path, check=True, timeout=120)
    assert [(masks / rank).read_text() for rank in ("0", "1")] == ["0,1", "0,1"]
