"""`agentrl.train`: one run on this machine, and what it came to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agentrl import config as configs
from agentrl.api.blocking import blocking
from agentrl.api.reading import Run, read_run
from agentrl.config import Config, ConfigSource, Overrides
from agentrl.errors import ConfigError
from agentrl.report.console import TrainConsole
from agentrl.report.learning_signal import LearningSignal
from agentrl.report.observer import Observer, Observers
from agentrl.report.statistics import EvalResult
from agentrl.run_folder import RunFolder
from agentrl.supervision.secrets import Secrets
from agentrl.training import run as training_run
from agentrl.training.resume import reopen


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to.

    Example:
        result = agentrl.train("configs/quickstart.yaml", {"train.steps": 20})
        result.after.avg - result.before.avg
    """

    folder: Path
    before: EvalResult  # of the first version; of several held-out sets, on the first: `run.evaluations()` has all
    after: EvalResult  # of the last one
    steps: int
    minutes: float  # spent training, resumed parts included
    note: str  # why the run ended early; empty if it did not
    signal: LearningSignal  # of all finished groups: `signal.useful_share`, `signal.cause`, `signal.remedy`
    report: Path  # report.html
    checkpoint: Path  # folder of the trained model, in the format of Hugging Face

    @property
    def run(self) -> Run:
        """Metrics, episodes and ledger: `read_run(folder)`."""
        return read_run(self.folder)


def train(
    config: ConfigSource | None = None,
    overrides: Overrides = (),
    *,
    resume: str | Path | None = None,
    observer: Observer | None = None,
    console: bool = False,
) -> RunResult:
    """Start sandbox, engine and learner on this machine, train, write the run folder, stop them, like `agentrl train`.

    Args:
        config: path of a YAML or JSON file, nested dict, or Config.
        overrides: `["learner.lr=1e-4"]` or `{"learner.lr": 1e-4}`.
        resume: folder of a run that is to continue; `config` is then the one in the folder.
        observer: is told of the folder, the phases, each step and each held-out measurement.
        console: print them, as the command does.

    Raises ConfigError, DataError or EnvError before anything is started, another AgentRLError where a part fails, and
    KeyboardInterrupt after Ctrl-C. Every part has stopped then, and the folder holds what was finished:
    `agentrl.train(resume=folder)` continues.

    Example:
        result = agentrl.train("configs/quickstart.yaml", {"train.steps": 20}, console=True)
        result = agentrl.train(resume=result.folder, overrides={"train.steps": 40})
    """
    settings, run = _new_or_resumed(config, overrides, resume)
    watch = Observers(TrainConsole(total_steps=settings.train.steps) if console else None, observer)
    training = training_run.Training(settings, watch, secrets=Secrets.from_environment(os.environ))
    folder = run or RunFolder.create(settings.out_dir, settings.name, config=settings)
    summary = blocking(training_run.train(training, folder, watch))
    return RunResult(
        folder=folder.path,
        before=summary.before,
        after=summary.after,
        steps=summary.num_steps,
        minutes=summary.train_s / 60,
        note=summary.note,
        signal=summary.signal,
        report=folder.report,
        checkpoint=folder.checkpoints / "final",
    )


def _new_or_resumed(
    config: ConfigSource | None, overrides: Overrides, resume: str | Path | None
) -> tuple[Config, RunFolder | None]:
    if resume is not None:
        if config is not None:
            raise ConfigError("a run that resumes has its config in its folder: give only what changes, as overrides")
        run, resumed = reopen(Path(resume), overrides)
        return resumed, run
    if config is None:
        raise ConfigError("give a config, e.g. agentrl train configs/quickstart.yaml, or --resume with a run's folder")
    return configs.load(config, overrides), None
