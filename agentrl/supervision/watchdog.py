"""Ends a run in which nothing moves any more: by name, with all stacks in a file. Knows nothing of what moves.

It works on a thread of its own, so that it also sees an event loop that stands still, and has a lookout in a process of
its own for code that lets no thread run. Time in which the whole process could not run (the machine slept, the process
or its container was stopped) does not count, and wall clocks are not looked at.
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
from agentrl.supervision import gil_watchdog as lookout
from agentrl.supervision.stacks import innermost, innermost_of_thread, task_stacks, thread_stacks
from agentrl.supervision.status import StatusFile
from agentrl.supervision.wait_graph import Snapshot, WaitGraph

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.run_folder import RunFolder

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the watchdog waits for what."""

    stall_s: float  # without any movement
    loop_s: float  # without a turn of the event loop
    interrupt_s: float = 20.0  # for an interrupted event loop to turn again
    end_s: float = 120.0  # for a run that was told to end: engines and learners get their time to stop
    tick_s: float = 1.0


class AwakeClock:
    """Seconds in which this process could run.

    A tick that comes late counts for no more than three ticks, or than the processor time that was used meanwhile: a
    stopped process uses none, code that lets no other thread run uses all of it.
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
    """Raise RunStalled in place of the block when nothing moves in it, or when it is cancelled and does not end.

    The stacks are in `dump` then.

    An event loop that stands still is interrupted, if it is the main thread's. Where that does not help, or the block
    does not end when it is cancelled, the process ends with EXIT_CODE; `last_words` gets the reason first.
    """
    dog = _Watchdog(wait_graph, patience, dump=dump, last_words=last_words)
    try:
        async with asyncio.TaskGroup() as tasks:
            verdict = tasks.create_task(dog.verdict(), name="stall watchdog")
            with dog.on_duty():
                yield
            verdict.cancel()
    except BaseExceptionGroup as errors:
        if dog.error is not None:
            raise dog.error from None  # what came of being interrupted is not the reason
        raise_first(errors)


@asynccontextmanager
async def supervised(limits: TrainConfig, folder: RunFolder) -> AsyncIterator[WaitGraph]:
    """A board for the run in `folder`; while the block runs it is watched, and everybody can see it in status.json."""
    wait_graph = WaitGraph()
    patience = Patience(stall_s=limits.stall_timeout_s, loop_s=limits.loop_stall_s)
    with StatusFile(folder.path, wait_graph, stall_timeout_s=limits.stall_timeout_s) as status:
        last_words = partial(status.end, "failed")
        async with watched(wait_graph, patience, dump=folder.logs / "stall.txt", last_words=last_words):
            yield wait_graph


class _Watchdog:
    """Made in the event loop that it watches."""

    def __init__(
        self, wait_graph: WaitGraph, patience: Patience, *, dump: Path, last_words: Callable[[str], None]
    ) -> None:
        self._wait_graph = wait_graph
        self._patience = patience
        self._dump = dump
        self._last_words = last_words
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop_thread = threading.get_ident()
        self._verdict: asyncio.Future[None] = self._loop.create_future()
        # Where the block ends first nobody asks for the verdict, and asyncio would print it.
        self._verdict.add_done_callback(lambda verdict: verdict.cancelled() or verdict.exception())
        self._off_duty = threading.Event()
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
        self._deaf_s = 0.0

    async def verdict(self) -> None:
        """Raises RunStalled as soon as that is what it is."""
        await self._verdict

    @contextmanager
    def on_duty(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._wait_graph.loop_turned()
        with self._interruptible(), _looked_after(self._patience, self._dump) as tick:
            thread = threading.Thread(target=self._watch, args=(tick,), name="stall watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._off_duty.set()
                thread.join(timeout=self._patience.tick_s)

    def _watch(self, tick: Callable[[], None]) -> None:
        while not self._off_duty.wait(self._patience.tick_s):
            tick()
            self._tick(self._clock.lap())

    def _tick(self, seconds: float) -> None:
        """Look once, `seconds` after the last time."""
        snapshot = self._wait_graph.snapshot()
        # Under a deadline that is still to come its owner acts first, and has time to do so.
        is_quiet = snapshot.num_beats == self._num_beats and not snapshot.has_open_deadline
        self._quiet_s = self._quiet_s + seconds if is_quiet else 0.0
        self._cancelled_s = self._cancelled_s + seconds if is_quiet and self._is_cancelled else 0.0
        self._num_beats = snapshot.num_beats
        self._loop_quiet_s = 0.0 if self._has_turned else self._loop_quiet_s + seconds
        if self.error is not None:
            self._see_to_the_end(seconds)
        elif self._loop_quiet_s >= self._patience.loop_s:
            self._fail(snapshot, self._blocked())
            self._interrupt()
        elif self._quiet_s >= self._patience.stall_s:
            self._fail(snapshot, stalled(snapshot, self._quiet_s))
        elif self._cancelled_s >= self._patience.end_s:
            chain = "; ".join(map(str, snapshot.chain())) or "nobody says what he waits for"
            self._fail(snapshot, f"the run was told to stop {self._cancelled_s:.0f} s ago and has not ended: {chain}")
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
            f"the event loop stood still for {self._loop_quiet_s:.0f} s, and everything with it: {where}. Blocking "
            "work belongs into `await asyncio.to_thread(...)`; train.loop_stall_s allows it for longer"
        )

    def _fail(self, snapshot: Snapshot, what: str) -> None:
        """Write the dump, and let the run end with RunStalled as soon as its loop turns."""
        self.error = RunStalled(f"{what}. Stacks, queues and ledger: {self._dump}")
        write_dump(self._dump, what, snapshot, self._loop)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pronounce, self.error)

    def _pronounce(self, error: RunStalled) -> None:
        if not self._verdict.done():
            self._verdict.set_exception(error)

    def _see_to_the_end(self, seconds: float) -> None:
        """A run that was told to end must do so."""
        if not self._is_ending:
            self._is_ending = True
            return  # these seconds lie before the verdict
        self._ending_s += seconds
        if self._loop_quiet_s >= self._patience.loop_s:
            # Still, or now in its cleaning up; of several tasks that block each has to be interrupted.
            self._interrupt()
            self._deaf_s += seconds
            if self._deaf_s >= self._patience.interrupt_s:
                self._exit("and could not be interrupted")
        else:
            self._deaf_s = 0.0
            if self._ending_s >= self._patience.end_s:
                self._exit(f"and did not end within {self._patience.end_s:.0f} s of being cancelled")

    def _interrupt(self) -> None:
        if self._loop_thread == threading.main_thread().ident:
            signal.pthread_kill(self._loop_thread, lookout.INTERRUPT)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let a signal raise the verdict in the main thread, in whatever holds the loop there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(lookout.INTERRUPT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(lookout.INTERRUPT, signal.SIG_DFL if before is None else before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None and self._has_turned:
            return
        if self.error is None:  # from the lookout; what we know of the loop is as old as our last tick
            where = innermost(frame) if frame else "something"
            what = f"no thread of this process ran for a long time: {where}"
            self.error = RunStalled(f"{what} holds the interpreter. Stacks: {self._dump}")
            self._loop.call_soon_threadsafe(self._pronounce, self.error)
        raise self.error

    def _exit(self, how: str) -> None:
        """End the process here and now. Its parts end with it: agentrl/supervision/orphan_guard.py."""
        why = f"{self.error}; the run was told so {how}, and was ended with exit code {EXIT_CODE}"
        with suppress(OSError):
            self._last_words(why)
        with suppress(OSError):
            os.write(2, f"RunStalled: {why}\n".encode())
        os._exit(EXIT_CODE)


@contextmanager
def _looked_after(patience: Patience, dump: Path) -> Iterator[Callable[[], None]]:
    """A lookout lives as long as the block; it wants to hear the yielded function called at every tick."""
    limits = (patience.loop_s + patience.interrupt_s, patience.interrupt_s)
    with tempfile.TemporaryFile() as stacks:
        command = [sys.executable, "-I", "-S", lookout.__file__, *map(str, limits), str(dump), str(stacks.fileno())]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[stacks.fileno()], start_new_session=True, bufsize=0
        )
        assert process.stdin is not None
        pipe = process.stdin
        os.set_blocking(pipe.fileno(), False)
        faulthandler.register(lookout.STACKS, file=stacks, all_threads=True)

        def tick() -> None:
            with suppress(OSError, ValueError):  # it is gone, or we are about to be
                pipe.write(b".")

        try:
            yield tick
        finally:
            pipe.close()
            process.wait()
            faulthandler.unregister(lookout.STACKS)


def stalled(snapshot: Snapshot, quiet_s: float) -> str:
    """What to say of a run in which nothing moved for `quiet_s` seconds."""
    chain = "; ".join(map(str, snapshot.chain()))
    return (
        f"nothing moved for {quiet_s:.0f} s ({snapshot.phase}; the last to move was the {snapshot.last_beat}): "
        + (chain or "nobody says what he waits for")
        + ". If that is how long it takes, raise train.stall_timeout_s"
    )


def write_dump(path: Path, what: str, snapshot: Snapshot, loop: asyncio.AbstractEventLoop) -> None:
    """Add everything that helps to find out why to the file. A disk that is full must not keep the run from ending."""
    gauges = snapshot.gauges
    head = [
        f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {what}",
        "who waits for whom, oldest first:\n" + ("\n".join(f"  {wait}" for wait in snapshot.waits) or "  nobody"),
        f"step {gauges.step} of {gauges.num_steps}, version {gauges.version} in the engines",
        "ledger: " + ", ".join(f"{name} {count}" for name, count in gauges.ledger.items()),
        "queues: " + ", ".join(f"{name} {count}" for name, count in gauges.queues.items()),
    ]
    # Nor must anything else: these stacks are those of running code.
    with suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            for stacks in (head, thread_stacks(), task_stacks(loop)):
                for text in stacks:
                    file.write(text.rstrip("\n") + "\n\n")
                file.flush()
