"""No child outlives its owner, however the owner ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentrl.errors import InfraError
from agentrl.supervision import child as supervise
from agentrl.supervision.backoff import RestartBudget
from agentrl.supervision.child import ChildDied, child, never
from tests.agentrl.training.troubles import Trouble

AGAIN = Trouble("the ... process ended with exit code ...; it is started again in ... s (... more times at most)")
GIVEN_UP = Trouble("the ... process ended with exit code ... (started ... times)... The end of ...")
NO_START = Trouble("the ... process could not be started: ...")

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), grandchild.pid, flush=True)
time.sleep(60)
"""


LEAVES_FILES = """
import multiprocessing, os, socket, tempfile, time
held = multiprocessing.get_context("spawn").Lock()
listening = socket.socket(socket.AF_UNIX)
listening.bind(tempfile.mktemp())
semaphore = "/dev/shm/sem." + held._semlock.name.removeprefix("/")
assert os.path.exists(semaphore)
print(os.getpid(), semaphore, listening.getsockname(), flush=True)
time.sleep(60)
"""


COMPILES = """
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
with open(default_cache_dir() + "/header", "a") as file:
    file.write("compiled ")
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False


async def pids_in(log: Path) -> list[int]:
    async with asyncio.timeout(10):
        while not (log.exists() and log.read_text().strip()):
            await asyncio.sleep(0.02)
    return [int(word) for word in log.read_text().split()]


async def test_leaving_the_block_ends_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with child("part", [sys.executable, "-c", STUBBORN], log_path=log):
        pids = await pids_in(log)
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("killed", ["nothing", "the command", "its guard"])
async def test_temporary_files_and_semaphores_are_removed_however_the_part_ends(tmp_path: Path, killed: str) -> None:
    log = tmp_path / "child.log"
    async with child("engine", [sys.executable, "-c", LEAVES_FILES], log_path=log, has_own_temporary=True) as part:
        async with asyncio.timeout(10):
            while not (log.exists() and log.read_text().endswith("\n")):
                await asyncio.sleep(0.02)
        pid, *left = log.read_text().split()
        assert all(Path(name).exists() for name in left)
        if killed != "nothing":
            os.kill(int(pid) if killed == "the command" else part.process.pid, signal.SIGKILL)
            with pytest.raises(ChildDied, match="SIGKILL"):
                await part.watch()
    async with asyncio.timeout(10):  # the semaphores of a killed guard's part: moments later
        while any(Path(name).exists() for name in (*left, Path(left[1]).parent)):
            await asyncio.sleep(0.02)


async def test_what_torch_compiled_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", COMPILES]
    for _ in range(2):
        async with child("engine", command, log_path=tmp_path / "engine.log", has_own_temporary=True) as part:
            assert await part.wait() == 0
    (cache,) = tmp_path.glob("torchinductor_*")
    assert (cache / "header").read_text() == "compiled compiled "


async def test_a_dead_child_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no model at /nowhere'); sys.exit(3)"]
    async with child("engine", command, log_path=tmp_path / "engine.log") as part:
        with pytest.raises(ChildDied, match=r"(?s)engine process ended with exit code 3.*no model at /nowhere"):
            await part.watch()


DIES = [sys.executable, "-c", "print('on', flush=True); exit(3)"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts follow at once."""
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_a_part_that_dies_at_once_three_times_in_a_row_is_given_up_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    async with child("engine", DIES, log_path=log) as part:
        part.allow_restarts(3)
        with pytest.raises(
            ChildDied, match=r"(?s)engine .* exit code 3 \(started 4 times\)\. The end of .*on"
        ) as found:
            await part.watch()
    assert GIVEN_UP.is_in(found.value)
    assert [AGAIN.is_in(record.getMessage()) for record in caplog.records] == [True] * 3
    assert log.read_text().count("on") == 4


def test_good_health_gives_restarts_back() -> None:
    hour, day = 3600.0, 86400.0
    weekly = RestartBudget(3)
    assert [weekly.take(day) for _ in range(7)] == [0] * 7
    sickly = RestartBudget(3)
    assert [sickly.take(1.0) for _ in range(4)] == [0, 1, 2, None]
    mixed = RestartBudget(2)
    assert [mixed.take(s) for s in (1.0, 1.0, 1.0, hour, 1.0)] == [0, 1, None, 1, None]


async def test_the_pauses_before_restarts_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def slept(seconds: float) -> None:
        pauses.append(seconds)

    async with child("engine", DIES, log_path=tmp_path / "log") as part:
        part.allow_restarts(3)
        monkeypatch.setattr(asyncio, "sleep", slept)
        with pytest.raises(ChildDied):
            await part.watch()
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, (1.0, 2.0, 4.0), strict=True))


@pytest.mark.usefixtures("quick")
async def test_the_command_of_a_restart_is_made_anew(tmp_path: Path) -> None:
    commands = iter([DIES, [sys.executable, "-c", "print('resumed')"]])
    lines: list[str] = []
    async with child("learner", lambda spot: next(commands), log_path=tmp_path / "log", on_line=lines.append) as part:
        part.allow_restarts(1)
        await part.watch()
    assert lines == ["on", "resumed"]


@pytest.mark.usefixtures("quick")
async def test_a_restart_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    async with child("engine", DIES, log_path=log) as part:
        await part.wait()
        shutil.rmtree(log.parent)
        part.allow_restarts(1)
        with pytest.raises(InfraError, match="No such file") as found:
            await part.watch()
    assert NO_START.is_in(found.value)


async def test_a_service_that_leaves_politely_is_missed_too(tmp_path: Path) -> None:
    async with child("sandbox", [sys.executable, "-c", ""], log_path=tmp_path / "log", may_end=never) as part:
        with pytest.raises(ChildDied, match="the sandbox process ended with exit code 0"):
            await part.watch()


async def test_a_killed_guard_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with child("part", [sys.executable, "-c", STUBBORN], log_path=log) as part:
        pids = await pids_in(log)
        part.process.kill()
        with pytest.raises(ChildDied, match=r"exit code -9 \(SIGKILL\)"):
            await part.watch()
        await asyncio.sleep(0.1)
        assert not any(alive(pid) for pid in pids)


@pytest.mark.usefixtures("quick")
async def test_a_part_may_end_once_it_is_done(tmp_path: Path) -> None:
    answers = iter([False, True])
    async with child(
        "learner", [sys.executable, "-c", ""], log_path=tmp_path / "l", may_end=lambda: next(answers)
    ) as part:
        part.allow_restarts(2)
        await part.watch()
    assert part.num_starts == 2


async def test_a_clean_exit_is_no_error(tmp_path: Path) -> None:
    async with child("learner", [sys.executable, "-c", ""], log_path=tmp_path / "log") as part:
        await part.watch()


async def test_cancellation_still_ends_the_child(tmp_path: Path) -> None:
    log = tmp_path / "child.log"

    async def owner() -> None:
        async with child("part", [sys.executable, "-c", STUBBORN], log_path=log):
            await asyncio.sleep(60)

    task = asyncio.create_task(owner())
    pids = await pids_in(log)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(alive(pid) for pid in pids)


async def test_killing_the_owner_kills_the_child(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    script = (
        "import asyncio, sys, pathlib\n"
        "from agentrl.supervision.child import child\n"
        "async def main():\n"
        f"    async with child('part', [sys.executable, '-c', {STUBBORN!r}], log_path=pathlib.Path({str(log)!r})):\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script])
    pids = await pids_in(log)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    deadline = time.monotonic() + 15
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
