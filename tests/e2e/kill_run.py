"""Starts `agentrl train`, kills one part after the other with kill -9, and resumes the run where that is needed.

Handles processes and the run's folder; kill_judge.py checks the result.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from agentrl import config as configs
from agentrl.config import Config
from agentrl.engine.vllm_command import MODULE
from agentrl.run_folder import RunFolder
from tests.device import engine_settings
from tests.e2e.kill_engine import OutsideEngine
from tests.e2e.kill_judge import Fate, fates

ENV_FILE = Path(__file__).parent / "kill_env.py"
START_TIMEOUT_S = 600.0  # long, for a machine that is busy with other work
PROGRESS_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 1800.0
MARK = "AGENTRL_TEST_MARK"


class Part(StrEnum):
    """A part of a run that can be killed."""

    LEARNER = "learner"
    ENGINE = "engine"
    SANDBOX = "sandbox"
    WORKER = "rollout worker"
    TRAIN = "agentrl train"


MODULE_OF = {
    Part.LEARNER: "trainer",
    Part.ENGINE: MODULE,
    Part.SANDBOX: "sandbox",
    Part.WORKER: "agentrl",
}
ENGINE_CORE = "VLLM::"  # vLLM's name for the process that computes; another one serves HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill -9."""

    part: Part
    at_s: float  # since the run's start
    after_step: int  # last step in metrics.jsonl
    in_flight: tuple[int, ...]  # ids of the groups in flight


@dataclass(kw_only=True)
class KillRun:
    """One run in a folder of its own.

    Args:
        settings: dotted overrides of the config below.
        engine: a server outside the run, restarted here after a kill; None: the run starts its own.
        max_delay_s: longest wait between progress and the kill.
    """

    folder: Path
    model: Path
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    engine: OutsideEngine | None = None
    max_delay_s: float = 4.0
    kills: list[Kill] = field(default_factory=list)
    num_resumes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._rng = random.Random(self.seed)
        self._mark = uuid.uuid4().hex
        self._log = self.folder / "out.log"
        self._config = self.folder / "config.yaml"
        self._config.write_text(json.dumps(base_config(self.folder, self.model)))
        settings = self.settings | ({"engine.url": self.engine.url} if self.engine else {})
        self._overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        self._started = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Config:
        """The config that the run uses."""
        return configs.load(self._config, self._overrides)

    @property
    def run(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(path=self.folder / "runs" / "kill")

    def go(self, parts: Iterable[Part] = ()) -> None:
        """Run to the end, with one kill for each of `parts` while the run lasts. Raises AssertionError."""
        try:
            self._start([str(self._config), *self._overrides])
            for part in parts:
                if not self._kill(part):
                    break
            self._wait_for(self._is_over, RUN_TIMEOUT_S, "the end of the run")
            assert self._code() == 0, self.report("it ended by itself")
        finally:
            self.stop()
        self.seconds = time.monotonic() - self._started

    def stop(self) -> None:
        """Kill every process of the run that still lives."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._wait_for(lambda: not self._left_over(), 30, "the end of every part")

    def report(self, what: str) -> str:
        """Text of a failure: what was killed when, and the ends of the logs."""
        kills = "\n".join(f"  {kill.at_s:6.1f} s, after step {kill.after_step}: {kill.part}" for kill in self.kills)
        logs = [self._log, *sorted(self.run.logs.glob("*.log"))]
        tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())
        return f"{what}; seed {self.seed}, folder {self.folder}, killed:\n{kills}\n{tails}"

    def _start(self, arguments: list[str]) -> None:
        self._is_hurt, self._last_start = False, time.time()
        command = [sys.executable, "-m", "agentrl", "train", *arguments]
        with self._log.open("ab") as log:
            environment = {**os.environ, MARK: self._mark}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def _kill(self, part: Part) -> bool:
        """Kill one part, mostly soon after progress, sometimes at any moment. False if the run had ended before."""
        since = time.time()
        if self._rng.random() < 0.75:
            self._wait_for(lambda: self._is_over() or self._moved(since), PROGRESS_TIMEOUT_S, "progress")
        time.sleep(self._rng.uniform(0, self.max_delay_s))
        victims: list[psutil.Process] = []

        def found() -> bool:
            victims[:] = self._processes(part)
            return bool(victims) or self._is_over()

        self._wait_for(found, PROGRESS_TIMEOUT_S, f"the {part}")
        if self._is_over():
            return False
        kill = Kill(
            part=part,
            at_s=time.monotonic() - self._started,
            after_step=self.last_step(),
            in_flight=tuple(fate.group_id for fate in self._fates() if fate.state == "in_flight"),
        )
        with suppress(psutil.NoSuchProcess):
            self._rng.choice(victims).send_signal(signal.SIGKILL)
        self.kills.append(kill)
        self._is_hurt = True
        if part is Part.TRAIN:
            self._resume()
        if part is Part.ENGINE and self.engine is not None:
            self.engine.stop()
            self.engine.start()
        return True

    def _resume(self) -> None:
        """Resume at once or three seconds later, while the remaining old parts may still be ending."""
        assert self._process is not None
        self._process.wait(10)
        time.sleep(self._rng.choice([0, 0, 3]))
        self.num_resumes += 1
        if self.run.journal.exists() and self.run.config.exists():
            self._start(["--resume", str(self.run.path)])
        else:  # killed before there was anything to resume
            _move_away(self.run.path)
            self._start([str(self._config), *self._overrides])

    def _is_over(self) -> bool:
        """Whether the run has ended. A run that lost a part before its first step ends with an error: it is resumed."""
        if self._code() and self._is_hurt and not self._moved(self._last_start):
            self._resume()
        return self._code() is not None

    def last_step(self) -> int:
        """Number of the last step; 0 before the first."""
        with suppress(OSError):
            lines = self.run.metrics.read_text().splitlines()
            steps = [json.loads(line)["step"] for line in lines if '"kind":"step"' in line.replace(" ", "")[:30]]
            return max(steps, default=0)
        return 0

    def num_in_flight(self) -> int:
        """Groups that are being played, by the journal."""
        return sum(fate.state == "in_flight" for fate in self._fates())

    def _moved(self, since: float) -> bool:
        """Whether a step was made after the time `since`."""
        with suppress(OSError):
            return self.last_step() > 0 and self.run.metrics.stat().st_mtime > since
        return False

    def _fates(self) -> list[Fate]:
        with suppress(sqlite3.Error):
            return fates(self.run.journal)
        return []  # the tables do not exist yet

    def _code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def _processes(self, part: Part) -> list[psutil.Process]:
        """Processes of the part itself, without the guard that started it."""
        assert self._process is not None
        if self._process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            train = psutil.Process(self._process.pid)
            if part is Part.TRAIN:
                return [train]
            outside = self.engine.processes() if part is Part.ENGINE and self.engine is not None else []
            return [child for child in (*train.children(recursive=True), *outside) if _is_of(child, part)]
        return []

    def _left_over(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _marked(process, self._mark)]

    def _wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.report(f"waited {seconds:g} s for {what}")
            time.sleep(0.05)


def base_config(folder: Path, model: Path) -> dict[str, Any]:
    """Config of a run with small groups whose parts may be restarted many times."""
    return {
        "name": "kill",
        "out_dir": str(folder / "runs"),
        "env": {"target": f"{ENV_FILE}:EvenTotal"},
        "model": {"path": str(model)},
        "rollout": {
            "groups_per_step": 2,
            "group_size": 4,
            "max_context": 256,
            "max_turn_tokens": 64,
            "max_retries": 8,
            "max_infra_error_rate": 1.0,
        },
        "engine": engine_settings(max_num_seqs=16, max_restarts=100, start_timeout_s=START_TIMEOUT_S),
        "sandbox": {"max_restarts": 100, "slots": 2},
        "learner": {"lr": 1e-4, "checkpoint_every": 3, "max_restarts": 100, "start_timeout_s": START_TIMEOUT_S},
        "eval": {"num_tasks": 2, "samples_per_task": 2, "every": 0},
        "train": {"steps": 9},
    }


def _is_of(process: psutil.Process, part: Part) -> bool:
    command = _command(process)
    if part is Part.ENGINE and "".join(command).startswith(ENGINE_CORE):
        return True
    return "-m" in command and command[command.index("-m") + 1] == MODULE_OF[part] and "-I" not in command


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _marked(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(MARK) == mark
    return False


def _move_away(path: Path) -> None:
    if path.exists():
        os.rename(path, path.with_name(f"{path.name}-never-began-{time.time_ns()}"))
