"""Ports and folders that a run claims, and gives back."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.supervision.serving import configured_port
from agentrl.train.launch import WEIGHTS_PREFIX, _progress_or_log, weights_folder
from tests.agentrl.train.troubles import Trouble

TAKEN = Trouble("...: cannot listen on ...: Address already in use. Choose another, or 0 for any free port")


def test_a_taken_port_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine\.port: cannot listen on 127\.0\.0\.1:{port}") as found:
            configured_port("127.0.0.1", port, key="engine.port")
    assert TAKEN.is_in(found.value)


def test_the_weights_folder_goes_with_the_run_and_sweeps_what_dead_runs_left(tmp_path: Path) -> None:
    with weights_folder(tmp_path) as folder:
        dead = folder.parent / f"{WEIGHTS_PREFIX}999999999-left"
        dead.mkdir()
        with weights_folder(tmp_path) as second:
            assert not dead.exists()
            assert folder.exists() and second != folder
            assert str(os.getpid()) in folder.name
    assert not folder.exists()


def test_weights_for_an_engine_on_another_machine_lie_in_the_runs_folder(tmp_path: Path) -> None:
    with weights_folder(tmp_path, urls=["http://127.0.0.1:8000", "http://node-2:8000"]) as folder:
        assert folder.parent == tmp_path.resolve()
    with weights_folder(tmp_path, urls=["http://localhost:8000"]) as folder:
        assert folder.parent == Path("/dev/shm")


def test_what_a_library_prints_between_progress_goes_to_the_log(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    on_line = _progress_or_log(lambda done, total: seen.append((done, total)), tmp_path / "warmstart.log")
    for line in ("[1, 20]", "[2026-11-21 15:29:12,816] [WARNING] Setting accelerator to CPU", "7", "[2, 20]"):
        on_line(line)
    assert seen == [(1, 20), (2, 20)]
    assert (tmp_path / "warmstart.log").read_text().splitlines()[1:] == ["7"]
