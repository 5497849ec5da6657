"""The program that answers lines: many questions at once, failures with a reason, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.errors import EnvError
from envs.adapters.from_verifiers import _Workers
from envs.adapters.line_process import LineProcess

PROGRAM = """
import json, subprocess, sys
held = []
for line in sys.stdin:
    asked = json.loads(line)
    what = asked.get("ask", "cancel")
    if what == "hold":
        held.append(asked["id"])
    elif what == "cancel":
        print(json.dumps({"id": asked["cancel"], "answer": None}))
        held.remove(asked["cancel"])
    elif what == "fail":
        print(json.dumps({"id": asked["id"], "error": "no such thing"}))
    elif what == "die":
        sys.exit("it was told to")
    elif what == "child":
        child = subprocess.Popen(["sleep", "60"])
        print(json.dumps({"id": asked["id"], "answer": child.pid}))
    else:
        print(json.dumps({"id": asked["id"], "answer": [asked, held]}))
    sys.stdout.flush()
"""
COMMAND = [sys.executable, "-I", "-S", "-c", PROGRAM]


@pytest.fixture
async def process() -> AsyncIterator[LineProcess]:
    opened = await LineProcess.open("helper", COMMAND, env={})
    yield opened
    await opened.close()


async def test_answers_find_their_questions(process: LineProcess) -> None:
    answers = await asyncio.gather(*[process.ask("echo", n=n) for n in range(5)])
    assert [asked["n"] for asked, _ in answers] == list(range(5))


async def test_a_question_that_is_cancelled_is_cancelled_there(process: LineProcess) -> None:
    question = asyncio.create_task(process.ask("hold"))
    while not (await process.ask("echo"))[1]:
        await asyncio.sleep(0.01)
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert (await process.ask("echo"))[1] == []


async def test_its_error_and_its_end_have_a_reason(process: LineProcess) -> None:
    with pytest.raises(EnvError, match="helper: no such thing"):
        await process.ask("fail")
    held = asyncio.create_task(process.ask("hold"))
    with pytest.raises(EnvError, match="it was told to"):
        await process.ask("die")
    with pytest.raises(EnvError, match="ended before it answered"):
        await held
    assert not process.is_open
    with pytest.raises(EnvError, match="ended before it answered 'echo'"):
        await process.ask("echo")


async def test_its_whole_process_group_ends_with_it(process: LineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.adapters.line_process.GRACE_S", 0.5)
    child = await process.ask("child")
    await process.close()
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the grandchild lives")


async def test_a_program_that_is_not_there_is_infrastructure() -> None:
    process = await LineProcess.open("helper", ["/no/such/program"], env={})
    with pytest.raises(EnvError, match="No such file"):
        await process.ask("echo")
    await process.close()


async def test_a_worker_that_dies_is_started_again_for_the_next_episode() -> None:
    workers = _Workers("helper", COMMAND, {})
    first = await workers.process()
    assert await workers.process() is first
    os.killpg(first._process.pid, signal.SIGKILL)
    with pytest.raises(EnvError):
        await first.ask("echo")
    second = await workers.process()
    assert (await second.ask("echo"))[1] == []
    await workers.close()
    assert not second.is_open
