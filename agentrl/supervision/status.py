"""RUN/status.json: a run writes it about once a second; `assess` judges from it whether the run is healthy.

Three things decide: what the file says, how old it is, and whether the process that wrote it still exists. Independent
of how a status is shown.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from agentrl.errors import ConfigError
from agentrl.run_folder import write_atomically
from agentrl.supervision.wait_graph import Snapshot, WaitGraph

log = logging.getLogger(__name__)

FILE_NAME = "status.json"
FORMAT = 1
EVERY_S = 1.0
OLD_S = 15.0
"""A heartbeat older than this counts as missing."""
RATE_WINDOW_S = 30.0
LAST_WRITE_S = 5.0
MAX_WHY = 2000

Ending = Literal["", "done", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that writes the file, so that a reader can check whether it still exists.

    >>> Writer.this_process().lives()
    True
    """

    pid: int
    started: str  # by the kernel's clock, because process numbers are reused
    machine: str  # name and boot id: process numbers are valid only in their own machine or container

    @classmethod
    def this_process(cls) -> Writer:
        """This process."""
        return cls(pid=os.getpid(), started=_started(os.getpid()), machine=_machine())

    def lives(self) -> bool | None:
        """Whether the process exists; None where that cannot be checked from this machine or container."""
        if self.machine != _machine():
            return None
        return _started(self.pid) == self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The content of status.json.

    Example:
        status = read_status("runs/quickstart")
        assess(status, Path("runs/quickstart")).sentence
    """

    format: int
    run: str
    writer: Writer
    started_at: float  # Unix time
    heartbeat_at: float  # Unix time
    heartbeat_up_s: float  # time since the machine started, which no clock change affects
    progress: Snapshot
    ending: Ending = ""
    why: str = ""
    placement: str = ""  # who uses which GPU, and how weights travel
    stall_timeout_s: float
    tokens_per_s: float | None = None  # over the last RATE_WINDOW_S
    steps_per_hour: float | None = None  # since the first step of this process

    def age_s(self) -> float:
        """Seconds since it was written."""
        if self.writer.machine == _machine():
            return max(0.0, _up_s() - self.heartbeat_up_s)
        return max(0.0, time.time() - self.heartbeat_at)


class RunState(StrEnum):
    """The state of a run, as `assess` finds it. Example: `assess(status, folder).state is RunState.STALLED`."""

    RUNNING = "running"
    STALLED = "stalled"
    DEAD = "dead"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """How a run is doing, in one sentence, and what can be done about it.

    Example: "The run is stalled: nothing moved for 7 min".
    """

    state: RunState
    sentence: str
    advice: str = ""


class StatusFile:
    """Keeps status.json up to date from a thread of its own while the block runs, then writes how the block ended.

    Example:
        with StatusFile(run.path, wait_graph, stall_timeout_s=900.0):
            ...
    """

    def __init__(
        self,
        folder: Path,
        wait_graph: WaitGraph,
        *,
        stall_timeout_s: float,
        every_s: float = EVERY_S,
        placement: str = "",
    ) -> None:
        self._path = folder / FILE_NAME
        self._wait_graph = wait_graph
        self._every_s = every_s
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._keep_writing, name="status file", daemon=True)
        self._failed_before = False
        self._rates = _Rates()
        self._status = RunStatus(
            format=FORMAT,
            run=folder.name,
            writer=Writer.this_process(),
            started_at=time.time(),
            heartbeat_at=0.0,
            heartbeat_up_s=0.0,
            progress=wait_graph.snapshot(),
            stall_timeout_s=stall_timeout_s,
            placement=placement,
        )

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.end("done")
        elif isinstance(error, Exception):
            self.end("failed", f"{type(error).__name__}: {error}")
        else:  # cancellation, Ctrl-C
            self.end("stopped")

    def end(self, ending: Ending, why: str = "") -> None:
        """Write the final status; a second call changes nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._write(ending, why[:MAX_WHY])

    def _keep_writing(self) -> None:
        while not self._over.wait(self._every_s):
            self._write()

    def _write(self, ending: Ending = "", why: str = "") -> None:
        # With a timeout: a disk that hangs must not keep the run from ending.
        if not self._writing.acquire(timeout=LAST_WRITE_S):
            return
        try:
            if self._over.is_set() and not ending:
                return
            now = self._now(ending, why)
            try:
                content = msgspec.json.format(msgspec.json.encode(now)) + b"\n"
                write_atomically(self._path, content, durable=False)
            except OSError as error:
                if not self._failed_before:
                    self._failed_before = True
                    log.warning("%s cannot be written: %s", self._path, error.strerror)
        finally:
            self._writing.release()

    def _now(self, ending: Ending, why: str) -> RunStatus:
        snapshot = self._wait_graph.snapshot()
        tokens_per_s, steps_per_hour = self._rates.observe(snapshot)
        return replace(
            self._status,
            heartbeat_at=time.time(),
            heartbeat_up_s=_up_s(),
            progress=snapshot,
            ending=ending,
            why=why,
            tokens_per_s=tokens_per_s,
            steps_per_hour=steps_per_hour,
        )


def read_status(path: str | Path) -> RunStatus:
    """The status of the run in the folder `path`. Raises ConfigError when there is none to read."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; runs are in runs/")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.json")
    file = folder / FILE_NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {FILE_NAME}: the run has not started, or an older agentrl made it; "
            f"`agentrl report {folder}` shows its results"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(content, type=_AnyFormat).format
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{file} is incomplete ({error}): the disk was full or the machine crashed; a run that continues writes it "
            "again within a second"
        ) from None
    if found != FORMAT:
        raise ConfigError(
            f"{file} has format {found}, this agentrl reads format {FORMAT}: use the version that started the run"
        )
    try:
        return msgspec.json.decode(content, type=RunStatus)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file} was not written by agentrl, or by another version of it: {error}") from None


def newest_run(out_dir: str | Path = "runs") -> Path:
    """The run folder with the newest status file; a folder without one counts by its config. Raises ConfigError."""
    folders = [config.parent for config in Path(out_dir).glob("*/config.json")]
    if not folders:
        raise ConfigError(f"there is no run in {out_dir}/ yet: `agentrl train CONFIG` makes one")
    return max(folders, key=_written_at)


def assess(status: RunStatus, folder: Path) -> Assessment:
    """The state of the run, one sentence about it, and what to do."""
    resume = f"agentrl train --resume {folder}"
    if status.ending:
        said = {"done": "The run is done", "failed": "The run failed", "stopped": "The run was stopped"}
        why = f": {status.why}" if status.why else ""
        advice = "" if status.ending == "done" else f"`{resume}` continues from the last checkpoint"
        return Assessment(state=RunState(status.ending), sentence=said[status.ending] + why, advice=advice)
    age_s, lives = status.age_s(), status.writer.lives()
    if lives is False:
        sentence = f"The run is dead: process {status.writer.pid} is gone; it last reported {_span(age_s)} ago"
        advice = f"`{resume}` continues from the last checkpoint"
        return Assessment(state=RunState.DEAD, sentence=sentence, advice=advice)
    if age_s > OLD_S:
        return _silent(status, age_s, lives, resume)
    return _judge_living(status, folder)


def _silent(status: RunStatus, age_s: float, lives: bool | None, resume: str) -> Assessment:
    pid, machine = status.writer.pid, status.writer.machine.partition("/")[0]
    if lives is None:
        return Assessment(
            state=RunState.DEAD,
            sentence=f"The run is probably dead: it last reported {_span(age_s)} ago, and its process {pid} is on "
            f"{machine}, which cannot be seen from here",
            advice=f"Check there; if it is gone, `{resume}` continues from the last checkpoint",
        )
    return Assessment(
        state=RunState.STALLED,
        sentence=f"The run is stalled: process {pid} exists and has not reported for {_span(age_s)}",
        advice=f"It may be stopped (`kill -CONT {pid}`), or its disk may be full. Otherwise end it (`kill {pid}`); "
        f"`{resume}` continues from the last checkpoint",
    )


def _judge_living(status: RunStatus, folder: Path) -> Assessment:
    now = status.progress
    if now.loop_quiet_s > OLD_S:
        return Assessment(
            state=RunState.STALLED,
            sentence=f"The run is stalled: its event loop has stood still for {_span(now.loop_quiet_s)}",
            advice=f"Its watchdog ends it after train.loop_stall_s and writes {folder}/logs/stall.txt",
        )
    if now.quiet_s > max(60.0, status.stall_timeout_s / 3) and not now.has_open_deadline:
        return Assessment(
            state=RunState.STALLED,
            sentence=f"The run is stalled: nothing moved for {_span(now.quiet_s)}",
            advice=f"Its watchdog ends it after train.stall_timeout_s={status.stall_timeout_s:g} s and writes "
            f"{folder}/logs/stall.txt",
        )
    return Assessment(state=RunState.RUNNING, sentence=f"The run is alive: {now.phase} for {_span(now.phase_s)}")


class _Rates:
    """Rates, from counters read at several times."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()
        self._first_step: tuple[float, int] | None = None

    def observe(self, snapshot: Snapshot) -> tuple[float | None, float | None]:
        """(tokens per second, steps per hour); None where it is not known yet."""
        now, gauges = time.monotonic(), snapshot.gauges
        self._tokens.append((now, gauges.num_tokens))
        while now - self._tokens[0][0] > RATE_WINDOW_S:
            self._tokens.popleft()
        since, tokens = self._tokens[0]
        tokens_per_s = (gauges.num_tokens - tokens) / (now - since) if now > since else None
        if self._first_step is None and gauges.step:
            self._first_step = (now, gauges.step)
        if self._first_step is None or gauges.step <= self._first_step[1]:
            return tokens_per_s, None
        since, step = self._first_step
        return tokens_per_s, 3600 * (gauges.step - step) / (now - since)


class _AnyFormat(msgspec.Struct):
    """A status file of any format."""

    format: int = 0


def _written_at(folder: Path) -> float:
    status = folder / FILE_NAME
    return (status if status.is_file() else folder / "config.json").stat().st_mtime


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the machine did; empty when there is none, or only a dead one."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _machine() -> str:
    with suppress(OSError):
        # A container has a name, and process numbers, of its own.
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


def _up_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
