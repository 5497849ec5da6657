"""The watchdog: ends a run in which nothing moves, with an error that names the cause and all stacks in a file.

It runs on a thread of its own, so that it also sees an event loop that stands still; for code that lets no thread run
it starts the GIL watchdog, a process (gil_watchdog.py). Time in which the whole process could not run (the machine
slept, the process or its container was stopped) does not count, and wall clocks are not used. Independent of what
moves: it reads the wait graph.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from agentrl.errors import RunStalled, raise_first
from agentrl.supervision import gil_watchdog
from agentrl.supervision.loop_thread import LoopPulse
from agentrl.supervision.stacks import innermost, innermost_of_thread, task_stacks, thread_stacks
from agentrl.supervision.status import StatusFile
from agentrl.supervision.wait_graph import Snapshot, WaitGraph

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.run_folder import RunFolder

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time limits of the watchdog. Example: `Patience(stall_s=900.0, loop_s=60.0)`."""

    stall_s: float  # without any movement
    loop_s: float  # in which one task keeps the event loop
    interrupt_s: float = 20.0  # until an interrupted event loop runs again
    end_s: float = 120.0  # until a cancelled run has ended: engines and learners need time to stop
    tick_s: float = 1.0


class AwakeClock:
    """Counts the seconds in which this process could run.

    A late tick counts for at most three ticks, or for the processor time used meanwhile if that is more: a stopped
    process uses none, and code that lets no other thread run uses all of it.
    """

    def __init__(
        self,
        tick_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._longest_s = 3 * tick_s
        self._clock, self._cpu_clock = clock, cpu_clock
        self._at, self._cpu_at = clock(), cpu_clock()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, cpu_before = self._at, self._cpu_at
        self._at, self._cpu_at = self._clock(), self._cpu_clock()
        return max(0.0, min(self._at - before, max(self._longest_s, self._cpu_at - cpu_before)))


@asynccontextmanager
async def watched(
    wait_graph: WaitGraph, patience: Patience, *, dump: Path, last_words: Callable[[str], None] = lambda why: None
) -> AsyncIterator[None]:
    """Cancel the block and raise RunStalled when nothing moves in it, or when it was cancelled and does not end.

    The stacks are in the file `dump` then. An event loop that stands still is interrupted, if it belongs to the main
    thread. Where that does not help, or the block does not end when it is cancelled, the process ends with EXIT_CODE,
    after `last_words` was called with the reason.

    Example:
        async with watched(wait_graph, Patience(stall_s=900, loop_s=60), dump=logs / "stall.txt"):
            await run()
    """
    dog = _Watchdog(wait_graph, patience, dump=dump, last_words=last_words)
    try:
        async with asyncio.TaskGroup() as tasks:
            failure = tasks.create_task(dog.failure(), name="stall watchdog")
            with dog.watching():
                yield
            failure.cancel()
    except BaseExceptionGroup as errors:
        if dog.error is not None:
            raise dog.error from None  # errors that the interruption caused are not the reason
        raise_first(errors)


@asynccontextmanager
async def supervised(config: TrainConfig, folder: RunFolder, *, placement: str = "") -> AsyncIterator[WaitGraph]:
    """The wait graph of the run in `folder`; while the block runs, it is watched and written to status.json."""
    wait_graph = WaitGraph()
    patience = Patience(stall_s=config.stall_timeout_s, loop_s=config.loop_stall_s)
    with StatusFile(folder.path, wait_graph, stall_timeout_s=config.stall_timeout_s, placement=placement) as status:
        last_words = partial(status.end, "failed")
        async with watched(wait_graph, patience, dump=folder.logs / "stall.txt", last_words=last_words):
            yield wait_graph


class _Watchdog:
    """Watches one block. Created in the event loop that it watches."""

    def __init__(
        self, wait_graph: WaitGraph, patience: Patience, *, dump: Path, last_words: Callable[[str], None]
    ) -> None:
        self._wait_graph = wait_graph
        self._patience = patience
        self._dump = dump
        self._last_words = last_words
        self._loop = asyncio.get_running_loop()
        self._pulse = LoopPulse(self._loop)
        self._task = asyncio.current_task()
        self._loop_thread = threading.get_ident()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        # Where the block ends first nothing awaits the future, and asyncio would print its exception.
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        self._over = threading.Event()
        self._clock = AwakeClock(patience.tick_s)
        self.error: RunStalled | None = None
        """Why the run has to end, once it has to."""
        self._num_beats = -1
        self._quiet_s = 0.0
        self._has_turned = True
        self._loop_quiet_s = 0.0
        self._is_cancelled = False
        self._cancelled_s = 0.0
        self._is_ending = False
        self._ending_s = 0.0
        self._uninterrupted_s = 0.0

    async def failure(self) -> None:
        """Raises RunStalled once the run is stalled."""
        await self._failure

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._wait_graph.loop_turned()
        with self._interruptible(), _with_gil_watchdog(self._patience, self._dump) as tick:
            thread = threading.Thread(target=self._watch, args=(tick,), name="stall watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join(timeout=self._patience.tick_s)

    def _watch(self, tick: Callable[[], None]) -> None:
        while not self._over.wait(self._patience.tick_s):
            tick()
            self._tick(self._clock.lap())

    def _tick(self, seconds: float) -> None:
        """Check the run, `seconds` after the last check."""
        snapshot = self._wait_graph.snapshot()
        # A wait with a deadline that is still ahead is ended by the part that waits.
        is_quiet = snapshot.num_beats == self._num_beats and not snapshot.has_open_deadline
        self._quiet_s = self._quiet_s + seconds if is_quiet else 0.0
        self._cancelled_s = self._cancelled_s + seconds if is_quiet and self._is_cancelled else 0.0
        self._num_beats = snapshot.num_beats
        # A pass in which thousands of tasks compute a little each may be long: the loop stands when one task keeps it.
        # Once the run has failed, every task that blocks is interrupted.
        has_moved = self._has_turned or (self._pulse.moved() and self.error is None)
        self._loop_quiet_s = 0.0 if has_moved else self._loop_quiet_s + seconds
        if self.error is not None:
            self._see_to_the_end(seconds)
        elif self._loop_quiet_s >= self._patience.loop_s:
            self._fail(snapshot, self._blocked())
            self._interrupt()
        elif self._quiet_s >= self._patience.stall_s:
            self._fail(snapshot, stalled(snapshot, self._quiet_s))
        elif self._cancelled_s >= self._patience.end_s:
            chain = "; ".join(map(str, snapshot.chain())) or "no part reports what it waits for"
            self._fail(snapshot, f"the run was cancelled {self._cancelled_s:.0f} s ago and has not ended: {chain}")
        if self._has_turned:
            self._has_turned = False
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turned)

    def _turned(self) -> None:
        self._has_turned = True
        self._is_cancelled = self._task is not None and self._task.cancelling() > 0
        self._wait_graph.loop_turned()

    def _blocked(self) -> str:
        where = innermost_of_thread(self._loop_thread)
        return (
            f"the event loop stood still for {self._loop_quiet_s:.0f} s, and everything with it: {where}. Put blocking "
            "work into `await asyncio.to_thread(...)`; train.loop_stall_s sets how long it may block"
        )

    def _fail(self, snapshot: Snapshot, what: str) -> None:
        """Write the dump, and end the run with RunStalled as soon as its event loop runs."""
        self.error = RunStalled(f"{what}. Stacks, queues and ledger: {self._dump}")
        write_dump(self._dump, what, snapshot, self._loop)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_with, self.error)

    def _end_with(self, error: RunStalled) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _see_to_the_end(self, seconds: float) -> None:
        """Ends the process when the run, which has failed, does not end."""
        if not self._is_ending:
            self._is_ending = True
            return  # these seconds were before the failure
        self._ending_s += seconds
        if self._loop_quiet_s >= self._patience.loop_s:
            # The loop still stands, or stands again during clean-up; each task that blocks has to be interrupted.
            self._interrupt()
            self._uninterrupted_s += seconds
            if self._uninterrupted_s >= self._patience.interrupt_s:
                self._exit("and could not be interrupted")
        else:
            self._uninterrupted_s = 0.0
            if self._ending_s >= self._patience.end_s:
                self._exit(f"and did not end within {self._patience.end_s:.0f} s of being cancelled")

    def _interrupt(self) -> None:
        if self._loop_thread == threading.main_thread().ident:
            signal.pthread_kill(self._loop_thread, gil_watchdog.INTERRUPT)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let a signal raise the error in the main thread, in the code that blocks the loop there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(gil_watchdog.INTERRUPT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(gil_watchdog.INTERRUPT, signal.SIG_DFL if before is None else before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None and self._has_turned:
            return
        if self.error is None:  # from the GIL watchdog; what this thread knows of the loop is as old as its last tick
            where = innermost(frame) if frame else "something"
            what = f"no thread of this process ran for a long time: {where}"
            self.error = RunStalled(f"{what} holds the interpreter. Stacks: {self._dump}")
            self._loop.call_soon_threadsafe(self._end_with, self.error)
        raise self.error

    def _exit(self, how: str) -> None:
        """End the process now. Its child processes end with it: agentrl/supervision/orphan_guard.py."""
        why = f"{self.error}; the run was cancelled {how}, and its process was ended with exit code {EXIT_CODE}"
        with suppress(OSError):
            self._last_words(why)
        with suppress(OSError):
            os.write(2, f"RunStalled: {why}\n".encode())
        os._exit(EXIT_CODE)


@contextmanager
def _with_gil_watchdog(patience: Patience, dump: Path) -> Iterator[Callable[[], None]]:
    """Run the GIL watchdog as long as the block; the yielded function must be called at every tick."""
    limits = (patience.loop_s + patience.interrupt_s, patience.interrupt_s)
    with tempfile.TemporaryFile() as stacks:
        command = [
            sys.executable,
            "-I",
            "-S",
            gil_watchdog.__file__,
            *map(str, limits),
            str(dump),
            str(stacks.fileno()),
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[stacks.fileno()], start_new_session=True, bufsize=0
        )
        assert process.stdin is not None
        pipe = process.stdin
        os.set_blocking(pipe.fileno(), False)
        faulthandler.register(gil_watchdog.STACKS, file=stacks, all_threads=True)

        def tick() -> None:
            with suppress(OSError, ValueError):  # it has ended, or this process is about to
                pipe.write(b".")

        try:
            yield tick
        finally:
            pipe.close()
            process.wait()
            faulthandler.unregister(gil_watchdog.STACKS)


def stalled(snapshot: Snapshot, quiet_s: float) -> str:
    """The message for a run in which nothing moved for `quiet_s` seconds."""
    chain = "; ".join(map(str, snapshot.chain()))
    return (
        f"nothing moved for {quiet_s:.0f} s ({snapshot.phase}; the last to move was the {snapshot.last_beat}): "
        + (chain or "no part reports what it waits for")
        + ". If a step may take this long, raise train.stall_timeout_s"
    )


def write_dump(path: Path, what: str, snapshot: Snapshot, loop: asyncio.AbstractEventLoop) -> None:
    """Append what helps to find the cause: waits, gauges, all stacks. A full disk must not keep the run from ending."""
    gauges = snapshot.gauges
    head = [
        f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {what}",
        "waits, oldest first:\n" + ("\n".join(f"  {wait}" for wait in snapshot.waits) or "  none"),
        f"step {gauges.step} of {gauges.num_steps}, version {gauges.version} in the engines",
        "ledger: " + ", ".join(f"{name} {count}" for name, count in gauges.ledger.items()),
        "queues: " + ", ".join(f"{name} {count}" for name, count in gauges.queues.items()),
    ]
    # Any other error must not either: the stacks are those of running code.
    with suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            for stacks in (head, thread_stacks(), task_stacks(loop)):
                for text in stacks:
                    file.write(text.rstrip("\n") + "\n\n")
                file.flush()
