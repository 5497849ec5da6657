"""The seam between a part and where it runs, on this machine: addresses, ports, and the host of a part on a node."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.supervision.child import Spot
from agentrl.supervision.orphan_guard import MARK_VARIABLE, processes
from agentrl.supervision.part_host import CannotStart, PartHost
from agentrl.supervision.place import LocalPlace, Needs
from agentrl.supervision.ray_cluster import Node, shortage
from tests.agentrl.supervision.test_child import alive
from tests.agentrl.supervision.test_process_trees import COMMAND, all_ended

SERVES = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); s.accept()"
FAST = {"python": sys.executable, "cwd": "/", "has_own_temporary": False}


def serve(spot: Spot) -> list[str]:
    return [sys.executable, "-c", SERVES, spot.host, str(spot.port)]


async def test_a_part_listens_where_its_place_says_and_keeps_its_address_on_this_machine(tmp_path: Path) -> None:
    async with LocalPlace().child("server", serve, log_path=tmp_path / "log", needs=Needs(port=0)) as part:
        first = part.spot
        part.end_all()
        await part.wait()
        await part.start()
        assert part.spot == first and part.num_starts == 2
        deadline = time.monotonic() + 10
        while socket.socket().connect_ex((part.spot.host, part.spot.port)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert await part.wait() == 0
    assert first.url == f"http://127.0.0.1:{first.port}"


async def test_a_port_that_is_taken_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        needs = Needs(port=taken.getsockname()[1], port_key="engine.port")
        with pytest.raises(ConfigError, match=r"engine\.port: cannot listen on"):
            async with LocalPlace().child("engine", serve, log_path=tmp_path / "log", needs=needs):
                pass


def test_the_table_of_a_shortage_says_what_is_asked_for_and_what_each_node_has() -> None:
    nodes = [
        Node(address="10.0.0.3", total={"CPU": 8.0, "GPU": 4.0}, available={"CPU": 7.5}),
        Node(address="10.0.0.14", total={"CPU": 64.0}, available={"CPU": 64.0}),
    ]
    assert shortage(Needs(bundle={"GPU": 2.0, "CPU": 1.0}, machines=2), nodes).splitlines() == [
        "asked for: 2 x {GPU: 2, CPU: 1}, each on a node of its own",
        "node       GPU free/all  CPU free/all",
        "10.0.0.3            0/4         7.5/8",
        "10.0.0.14           0/0         64/64",
    ]


@pytest.fixture
def host() -> Iterator[PartHost]:
    host = PartHost()
    yield host
    host.stop()
    host.end_all()


def all_news(host: PartHost) -> tuple[bytes, bytes, int]:
    """Everything up to the exit code."""
    log, output = b"", b""
    while True:
        more, lines, code = host.news(len(log), len(output), within_s=20)
        log, output = log + more, output + lines
        if code is not None:
            return log, output, code


def test_a_host_reports_the_log_the_output_and_the_exit_code(host: PartHost) -> None:
    code = "import os, sys; print(os.environ['KEY'] * 70_000); print('b', file=sys.stderr); sys.exit(3)"
    host.start([sys.executable, "-c", code], {"KEY": "a"}, **FAST, has_output=True)
    assert all_news(host) == (b"b\n", b"a" * 70_000 + b"\n", 3)


def test_news_that_there_are_none_of_are_waited_for_no_longer_than_asked(host: PartHost) -> None:
    host.start(["sleep", "60"], {}, **FAST)
    assert host.news(0, 0, within_s=0.2) == (b"", b"", None)


def test_a_host_keeps_no_log_that_was_read(host: PartHost) -> None:
    host.start([sys.executable, "-c", "print(('x' * 999 + '\\n') * 3000)"], {}, **FAST)
    log, output, _ = all_news(host)
    assert len(log) == 3_000_001
    host.news(len(log), len(output), within_s=0)
    held = os.fstat(host._log.fileno())
    assert held.st_size == len(log) and held.st_blocks * 512 <= 8192, "of three megabytes"


def test_a_process_that_got_the_number_of_a_killed_guard_is_left_alone(
    host: PartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = host.start(COMMAND, {}, **FAST)
    pids = pids_of(host)
    os.kill(guard, signal.SIGKILL)
    assert all_news(host)[2] == -9
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        with monkeypatch.context() as patch:
            patch.setattr(host, "_pid", other.pid)
            host.end_all()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        other.kill()
    host.end_all()
    assert all_ended(pids, 10.0)


def pids_of(host: PartHost) -> list[int]:
    log = b""
    while not log.endswith(b"\n"):
        log += host.news(len(log), 0, within_s=10)[0]
    return [int(word) for word in log.split()]


@pytest.mark.parametrize("how", ["asked", "killed", "guard killed", "actor gone"])
def test_a_host_leaves_no_process(host: PartHost, how: str) -> None:
    guard = host.start(COMMAND, {}, **FAST)
    pids = pids_of(host)
    assert next(parent for pid, parent, _ in processes() if pid == guard) != os.getpid(), "Ray kills its children"
    if how in ("asked", "actor gone"):  # Ray ends an actor's process, and with it the guard's input
        host.stop()
    elif how == "killed":
        host.end_all()
    else:
        os.kill(guard, signal.SIGKILL)
        assert all_news(host)[2] == -9
        host.end_all()
    assert all_ended([guard, *pids], 10.0)


def test_a_host_whose_own_process_is_killed_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, time; from agentrl.supervision.part_host import PartHost; host = PartHost(); "
        f"print(host.start({COMMAND!r}, {{}}, python=sys.executable, cwd='/', has_own_temporary=True), flush=True)\n"
        "while True:\n"
        "    log = host.news(0, 0, within_s=10)[0]\n"
        "    log and print(log.decode(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for _ in range(2) for word in owner.stdout.readline().split()]
        assert len(pids) == 5 and all(map(alive, pids))
        folder = next(
            word.split(b"=")[1]
            for word in Path(f"/proc/{pids[1]}/environ").read_bytes().split(b"\0")
            if word.startswith(b"TMPDIR=")
        )
        owner.kill()
    assert all_ended(pids, 10.0)
    assert not Path(os.fsdecode(folder)).exists()


def test_a_folder_that_the_node_does_not_have_is_named(host: PartHost) -> None:
    with pytest.raises(CannotStart, match="has no folder /no/such: start the run in a folder that all nodes see"):
        host.start(["true"], {}, **{**FAST, "cwd": "/no/such"})
    assert MARK_VARIABLE not in os.environ
