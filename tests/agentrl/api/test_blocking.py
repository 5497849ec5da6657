"""Asynchronous work for callers that are not: its result, its errors, its clean-up after Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.api.blocking import blocking

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


async def work(*, fails: bool = False) -> tuple[str, bool]:
    await asyncio.sleep(0)
    if fails:
        raise OSError("broken")
    return NAME.get(), threading.current_thread() is threading.main_thread()


def in_a_running_loop(*, fails: bool = False) -> tuple[str, bool]:
    async def cell() -> tuple[str, bool]:
        return blocking(work(fails=fails))

    return asyncio.run(cell())


@pytest.mark.parametrize(("call", "is_main"), [(lambda **how: blocking(work(**how)), True), (in_a_running_loop, False)])
def test_the_result_the_error_and_the_context_are_the_callers(call, is_main) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    NAME.set("mine")
    assert call() == ("mine", is_main)
    with pytest.raises(OSError, match="broken"):
        call(fails=True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_thread_of_the_caller_may_call_it() -> None:
    NAME.set("mine")
    results: list[tuple[str, bool]] = []
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: results.append(context.run(lambda: blocking(work()))))
    thread.start()
    thread.join()
    assert results == [("mine", False)]


def test_after_ctrl_c_the_caller_is_stopped_even_if_the_work_ends_as_if_nothing_had_happened() -> None:
    async def stubborn() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

    with pytest.raises(KeyboardInterrupt):
        blocking(stubborn())


def test_signals_that_the_process_handles_or_ignores_stay_its_own() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def signalled() -> str:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.01)
        return "undisturbed"

    try:
        assert blocking(signalled()) == "undisturbed"
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, hup)
    assert seen == [signal.SIGTERM]


ENVIRONMENT = """
from agentrl import Env, StepResult, Task, user


class Echo(Env):
    @classmethod
    def tasks(cls, split, *, data=None, seed=0):
        return [Task(id="one", prompt="Say 1.", answer="1")]

    async def reset(self, *, task, seed=None):
        return [user(task.prompt)], {}

    async def step(self, action):
        return StepResult([], 0.0, True, False, {})

    async def score(self, episode):
        return {"correct": 1.0}
"""
SCRIPT = """
import asyncio, sys
import agentrl


class Told(agentrl.Observer):
    def phase_started(self, name):
        print("began", name, flush=True)

    def phase_ended(self, name, seconds, outcome):
        print("ended", name, outcome, flush=True)


def play():
    config = {
        "name": "x",
        "env": {"target": "echo_env.py:Echo"},
        "model": {"path": "unused"},
        "sandbox": {"backend": "unsafe", "allow_unsafe": True},
    }
    try:
        agentrl.rollout(config, model=sys.argv[2], served_model="m", observer=Told())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


async def cell():
    play()


play() if sys.argv[1] == "script" else asyncio.run(cell())
"""


@pytest.fixture
def silence() -> Iterator[str]:
    """The URL of an endpoint that never answers a completion. What it is asked before has an answer at once."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            over.wait(120)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        over.set()
        server.shutdown()


def marked(mark: str) -> list[int]:
    def has_it(entry: Path) -> bool:
        try:
            return mark.encode() in (entry / "environ").read_bytes()
        except OSError:
            return False

    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and has_it(entry)]


@pytest.mark.parametrize(
    ("how", "number"),
    [pytest.param("script", signal.SIGTERM, marks=pytest.mark.slow), ("notebook", signal.SIGINT)],
)
def test_an_interrupted_rollout_leaves_no_process(
    tmp_path: Path, silence: str, how: str, number: signal.Signals
) -> None:
    (tmp_path / "echo_env.py").write_text(ENVIRONMENT)
    (tmp_path / "play.py").write_text(SCRIPT)
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "play.py", how, silence],
        cwd=tmp_path,
        env={**os.environ, "AGENTRL_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            said = [line.strip() for line in iter(process.stdout.readline, "began playing\n") if process.poll() is None]
            assert said == ["began starting the sandbox", "ended starting the sandbox done"]
            assert len(marked(mark)) > 1  # the sandbox and its guard
            process.send_signal(number)
            assert process.stdout.read().splitlines() == ["ended playing stopped", "interrupted"]
            assert "KeyboardInterrupt" in process.stderr.read()
            assert process.wait(30) != 0
        finally:
            process.kill()
    assert marked(mark) == []
