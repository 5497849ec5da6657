"""Whoever starts a part owns its whole tree of processes, whichever of them are killed, and however the others hide."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.supervision.child import ChildDied, child
from agentrl.supervision.orphan_guard import MARK_VARIABLE, processes
from tests.agentrl.supervision.test_child import alive, pids_in

# The first grandchild hides its environment, as vLLM's engine process does; the second leaves the session, as ranks
# below torchrun do; the third knows code of ours.
TREE = """
import os, subprocess, sys, time

def start(code, **options):
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)
    started.stdout.readline()
    return started.pid

SLEEP = "; print('ready', flush=True); import time; time.sleep(60)"
renamed = start("import setproctitle; setproctitle.setproctitle('VLLM::EngineCore')" + SLEEP)
apart = start("pass" + SLEEP, start_new_session=True)
ours = start("from agentrl.supervision.parent import end_with_parent; end_with_parent(); end_with_parent()" + SLEEP)
print(os.getpid(), renamed, apart, ours, flush=True)
time.sleep(60)
"""
COMMAND = [sys.executable, "-c", TREE]
OWNER = f"""
import asyncio, pathlib, sys
from agentrl.supervision.child import child

async def main():
    async with child("part", [sys.executable, "-c", {TREE!r}], log_path=pathlib.Path(sys.argv[1])):
        await asyncio.sleep(60)

asyncio.run(main())
"""
FOREGROUND = f"""
import sys
from agentrl.supervision.process_tree import in_foreground

print(in_foreground([sys.executable, "-c", {TREE!r}], env={{}}), file=sys.stderr)
"""


def parent_of(pid: int) -> int:
    return next(parent for found, parent, _ in processes() if found == pid)


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the kernel was faster
            os.kill(pid, signal.SIGKILL)


def all_ended(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize("killed", ["the command", "the guard", "the guard and the command"])
async def test_a_part_that_was_killed_leaves_no_process(tmp_path: Path, killed: str) -> None:
    async with child("engine", COMMAND, log_path=tmp_path / "log") as part:
        command, renamed, *others = await pids_in(tmp_path / "log")
        assert MARK_VARIABLE.encode() not in Path(f"/proc/{renamed}/environ").read_bytes()
        kill(*[part.process.pid] * ("guard" in killed), *[command] * ("command" in killed))
        with pytest.raises(ChildDied, match="SIGKILL"):
            await part.watch()
        assert await asyncio.to_thread(all_ended, [command, renamed, *others], 2.0)


async def test_leaving_the_block_ends_processes_in_sessions_of_their_own(tmp_path: Path) -> None:
    async with child("learner", COMMAND, log_path=tmp_path / "log"):
        pids = await pids_in(tmp_path / "log")
    assert not any(map(alive, pids))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log")])
    yield process
    process.kill()
    process.wait()


async def test_a_guard_whose_owner_was_killed_ends_the_whole_tree(
    owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    pids = await pids_in(tmp_path / "log")
    guard = parent_of(pids[0])
    owner.kill()
    assert await asyncio.to_thread(all_ended, [guard, *pids], 10.0)


async def test_processes_with_code_of_ours_end_even_when_everybody_above_them_was_killed_at_once(
    owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command, *hidden, ours = await pids_in(tmp_path / "log")
    guard = parent_of(command)
    kill(owner.pid, guard)  # the kernel kills the command
    try:
        assert await asyncio.to_thread(all_ended, [command, ours], 5.0)
    finally:
        kill(*hidden)  # nobody is left who could


async def test_a_server_in_the_foreground_leaves_no_process(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        owner = subprocess.Popen([sys.executable, "-c", FOREGROUND], stdout=log, stderr=subprocess.PIPE)
    pids = await pids_in(tmp_path / "log")
    kill(parent_of(pids[0]), pids[0])
    _, said = await asyncio.to_thread(owner.communicate, timeout=20)
    assert said.decode().split() == ["-9"]
    assert await asyncio.to_thread(all_ended, pids, 2.0)


async def test_a_guard_reaps_the_orphans_that_it_adopts(tmp_path: Path) -> None:
    orphans = "import subprocess, sys, time; subprocess.run(['sh', '-c', 'sleep 0.05 & echo $!']); time.sleep(60)"
    async with child("tool", [sys.executable, "-c", orphans], log_path=tmp_path / "log") as part:
        (orphan,) = await pids_in(tmp_path / "log")
        async with asyncio.timeout(10):
            while Path(f"/proc/{orphan}").exists():
                await asyncio.sleep(0.02)
        assert part.poll() is None


async def test_a_session_whose_number_was_given_away_is_left_alone(tmp_path: Path) -> None:
    innocent = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    async with child("tool", ["sleep", "60"], log_path=tmp_path / "log") as part:
        part.process.kill()
        await part.process.wait()
        part.process.pid = innocent.pid
        part.end_all()
        assert alive(innocent.pid)
    innocent.kill()
    await innocent.wait()
