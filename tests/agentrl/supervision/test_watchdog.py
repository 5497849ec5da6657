"""Real tasks that hang, loops that stand still and clocks that jump, with limits short enough for a test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import EngineError, RunStalled
from agentrl.supervision.wait_graph import Gauges, WaitGraph
from agentrl.supervision.watchdog import EXIT_CODE, AwakeClock, Patience, watched

ROOT = Path(__file__).parents[3]
QUICK = Patience(stall_s=0.3, loop_s=20.0, tick_s=0.02)


async def hang(wait_graph: WaitGraph) -> None:
    never = asyncio.Event()
    with wait_graph.waiting("rollouts", on="engine at http://127.0.0.1:1", what="generate"):
        await never.wait()


async def test_a_run_that_hangs_ends_by_name_with_a_dump(tmp_path: Path) -> None:
    wait_graph = WaitGraph()
    wait_graph.measure(lambda: Gauges(step=3, num_steps=9, ledger={"issued": 12}, queues={"ready": 1}))
    dump = tmp_path / "logs" / "stall.txt"
    began = time.monotonic()
    with pytest.raises(RunStalled) as caught:
        async with watched(wait_graph, QUICK, dump=dump):
            task = asyncio.create_task(hang(wait_graph), name="group 17")
            with wait_graph.waiting("training loop", on="rollouts", what="a full batch"):
                try:
                    await task
                finally:
                    task.cancel()
    assert time.monotonic() - began < 30
    said = str(caught.value)
    assert "the training loop waits for the rollouts (a full batch," in said
    assert "the rollouts wait for the engine at http://127.0.0.1:1 (generate," in said
    assert str(dump) in said
    text = dump.read_text()
    assert re.search(r"task 'group 17' \(waiting\)\n(.*\n){0,4}.*in hang\n(.*\n)*?.*await never.wait\(\)", text)
    assert "thread 'MainThread'" in text
    assert "issued 12" in text and "ready 1" in text and "step 3 of 9" in text


async def test_a_run_that_moves_is_left_alone(tmp_path: Path) -> None:
    wait_graph = WaitGraph()
    async with watched(wait_graph, QUICK, dump=tmp_path / "stall.txt"):
        for _ in range(10):
            await asyncio.sleep(0.1)
            wait_graph.beat("engine")
    assert not (tmp_path / "stall.txt").exists()


async def test_a_long_pass_of_the_event_loop_in_which_tasks_take_turns_is_not_a_loop_that_stands_still(
    tmp_path: Path,
) -> None:
    async def compute() -> None:
        time.sleep(0.2)

    patience = Patience(stall_s=60.0, loop_s=2.0, tick_s=0.02)
    async with watched(WaitGraph(), patience, dump=tmp_path / "stall.txt"):
        await asyncio.gather(*(compute() for _ in range(20)))  # in one pass, 4 s in all
    assert not (tmp_path / "stall.txt").exists()


async def test_a_wait_with_a_deadline_of_its_own_is_left_to_its_owner(tmp_path: Path) -> None:
    wait_graph = WaitGraph()
    async with watched(wait_graph, QUICK, dump=tmp_path / "stall.txt"):
        with wait_graph.waiting("training loop", on="learner", what="a step", within_s=60):
            await asyncio.sleep(0.8)
    with pytest.raises(RunStalled):
        async with watched(wait_graph, QUICK, dump=tmp_path / "stall.txt"):
            with wait_graph.waiting("training loop", on="learner", what="a step", within_s=0.1):
                await asyncio.sleep(10)


async def test_an_error_in_the_block_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="as it was"):
        async with watched(WaitGraph(), QUICK, dump=tmp_path / "stall.txt"):
            raise EngineError("as it was")


async def test_a_cancellation_from_outside_is_a_cancellation(tmp_path: Path) -> None:
    async def run() -> None:
        async with watched(WaitGraph(), QUICK, dump=tmp_path / "stall.txt"):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_that_swallows_its_cancellation_is_cancelled_again(tmp_path: Path) -> None:
    wait_graph = WaitGraph()

    async def run() -> None:
        async with watched(wait_graph, replace(QUICK, stall_s=60.0, end_s=0.3), dump=tmp_path / "stall.txt"):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            with wait_graph.waiting("run", on="engine", what="its end"):
                await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(RunStalled, match=r"was cancelled .* the run waits for the engine \(its end"):
        await task


async def test_a_dump_that_cannot_be_written_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunStalled):
        async with watched(WaitGraph(), QUICK, dump=tmp_path / "file" / "stall.txt"):
            await asyncio.Event().wait()


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    now_s, cpu_s = [0.0], [0.0]
    clock = AwakeClock(1.0, clock=lambda: now_s[0], cpu_clock=lambda: cpu_s[0])
    now_s[0] += 1.1
    assert clock.lap() == pytest.approx(1.1)
    now_s[0] += 3600  # a container frozen, a machine asleep whose clock went on
    assert clock.lap() == pytest.approx(3.0)
    now_s[0] += 100  # code that let no other thread run
    cpu_s[0] += 99
    assert clock.lap() == pytest.approx(99)
    now_s[0] -= 50
    assert clock.lap() == 0


# What ends or stops a process happens in a process of its own.

PROGRAM = """
import asyncio, itertools, re, sys, time
from pathlib import Path
from agentrl.errors import RunStalled
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.supervision.watchdog import Patience, watched

folder = Path(sys.argv[1])
patience = Patience(stall_s={stall_s}, loop_s=0.4, interrupt_s=0.6, end_s=0.6, tick_s=0.04)

async def run():
    wait_graph = WaitGraph()
    async with watched(wait_graph, patience, dump=folder / "stall.txt", last_words=(folder / "words").write_text):
        print("begun", flush=True)
{body}

try:
    asyncio.run(run())
    print("ended well")
except RunStalled as error:
    print("RunStalled:", error)
"""


@contextmanager
def running(folder: Path, body: str, *, stall_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """The program with `body` inside `watched`; it is under way."""
    indented = "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "program.py").write_text(PROGRAM.format(body=indented, stall_s=stall_s))
    command = [sys.executable, str(folder / "program.py"), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_a_blocked_loop_is_interrupted_and_the_code_that_blocks_it_is_named(tmp_path: Path) -> None:
    with running(tmp_path, "time.sleep(1000)") as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert re.search(r"RunStalled: the event loop stood still for \d s.*program.py:\d+ in run", said), said
    assert "time.sleep(1000)" in (tmp_path / "stall.txt").read_text()


def test_tasks_that_block_one_after_the_other_are_all_interrupted(tmp_path: Path) -> None:
    body = "async def one():\n    time.sleep(1000)\nawait asyncio.gather(*(one() for _ in range(5)))"
    with running(tmp_path, body) as process:
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said[:11]) == (0, "RunStalled:"), said


def test_a_loop_that_cannot_be_interrupted_ends_the_process(tmp_path: Path) -> None:
    body = "while True:\n    try:\n        time.sleep(1000)\n    except Exception:\n        pass"
    with running(tmp_path, body) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_CODE, said
    assert "could not be interrupted" in said
    assert "could not be interrupted" in (tmp_path / "words").read_text()
    assert "time.sleep(1000)" in (tmp_path / "stall.txt").read_text()


def test_a_run_that_does_not_end_when_it_is_cancelled_ends_the_process(tmp_path: Path) -> None:
    body = "while True:\n    try:\n        await asyncio.sleep(1000)\n    except asyncio.CancelledError:\n        pass"
    with running(tmp_path, body, stall_s=0.3) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_CODE, said
    assert "did not end within 1 s of being cancelled" in said


def test_a_process_that_was_stopped_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, "await asyncio.sleep(0.5)", stall_s=2.0) as process:
        time.sleep(0.1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # longer than stall_s
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "ended well\n"), said
    assert not (tmp_path / "stall.txt").exists()


@pytest.mark.parametrize("code", ["re.match('(a+)+$', 'a' * 60 + 'b')", "7 ** 10 ** 9"])
def test_code_that_lets_no_thread_run_is_interrupted_too(tmp_path: Path, code: str) -> None:
    with running(tmp_path, code) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert re.search(r"program.py:\d+ in run holds the interpreter", said), said
    assert re.search(r"program.py.*line \d+ in run", (tmp_path / "stall.txt").read_text())


def test_code_that_cannot_be_interrupted_and_lets_no_thread_run_is_killed_with_its_process(tmp_path: Path) -> None:
    with running(tmp_path, "sum(itertools.repeat(0))") as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, said
    assert "could not be interrupted and was killed" in said
    assert re.search(r"program.py.*line \d+ in run", (tmp_path / "stall.txt").read_text())


def test_the_gil_watchdog_ends_with_its_process(tmp_path: Path) -> None:
    with running(tmp_path, "await asyncio.sleep(60)") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.kill()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
