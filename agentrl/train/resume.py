"""A run that goes on: its config, what of that may change, and whether there is anything left to do.

Knows no processes; what is left to do is the journal's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl import config as configs
from agentrl.buffer.journal import Journal
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder, write_atomically

# What changes neither the weights nor what the journal holds.
CHANGEABLE = (
    *("train.", "eval.", "engine.", "sandbox.", "learner.checkpoint_every", "learner.keep_checkpoints"),
    *("learner.save_every", "learner.start_timeout_s", "learner.step_timeout_s", "learner.max_restarts"),
)


class CannotGoOn(ConfigError):
    """There is nothing left to do in the run, or it would become another run."""


def reopen(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, Config]:
    """The run's folder, and its config with `overrides`, which is saved in it.

    Raises ConfigError where there is no run, CannotGoOn where an override changes what must stay or the run is over.
    """
    folder = RunFolder.open(path)
    config = configs.load(folder.config, overrides)
    go_on(folder, config)
    return folder, config


def go_on(folder: RunFolder, config: Config) -> None:
    """Let the run have this config from now on. Raises CannotGoOn as `reopen` does."""
    before = configs.load(folder.config)
    changed = sorted(_changed(before.model_dump(), config.model_dump()))
    if refused := [key for key in changed if not key.startswith(CHANGEABLE)]:
        raise CannotGoOn(
            f"{refused[0]} cannot change in a run that goes on: what it has trained and what it has still to train "
            f"would not belong together. Leave it, or begin a new run from these weights "
            f"(model.path={folder.checkpoints}/final)"
        )
    _check_work_is_left(folder, config)
    write_atomically(folder.config, (config.model_dump_json(indent=2) + "\n").encode())


def _check_work_is_left(folder: RunFolder, config: Config) -> None:
    if not folder.journal.exists():
        raise CannotGoOn(f"{folder.path} has no journal.sqlite: the run never began; start it anew")
    with closing(Journal(folder.journal)) as journal:
        step, train_s = journal.last_step(), journal.train_s()
        is_measured = step in journal.evaluations()
    if not (is_measured and (folder.checkpoints / "final").is_dir()):
        return
    limits = config.train
    if step >= limits.steps:
        raise CannotGoOn(f"{folder.path} is over: {step} of {limits.steps} steps. To go on, give train.steps=N")
    if limits.max_minutes is not None and train_s >= 60 * limits.max_minutes:
        raise CannotGoOn(
            f"{folder.path} is over: the {limits.max_minutes:g} minutes of train.max_minutes were used up. To go on, "
            "give train.max_minutes=N, counted from the beginning of the run"
        )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the leaves that differ."""
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"
