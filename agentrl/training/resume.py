"""Resuming a run: its config, which keys may change, and whether any work is left.

Independent of processes; the journal says which work is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from agentrl import config as configs
from agentrl.buffer.journal import Journal
from agentrl.config import Config, Overrides
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder, write_atomically

# Keys that affect neither the weights nor the content of the journal.
CHANGEABLE = (
    *("train.", "eval.", "metrics.", "engine.", "sandbox.", "learner.checkpoint_every", "learner.keep_checkpoints"),
    *("learner.save_every", "learner.start_timeout_s", "learner.step_timeout_s", "learner.max_restarts"),
)


class CannotResume(ConfigError):
    """The run has no work left, or the new config would make it another run. Example: another `seed`."""


def reopen(path: Path, overrides: Overrides) -> tuple[RunFolder, Config]:
    """The run's folder, and its config with `overrides`, which is saved in the folder.

    Raises ConfigError where there is no run, CannotResume where an override changes a fixed key or the run is over.

    Example:
        folder, config = reopen(Path("runs/quickstart"), ["train.steps=400"])
    """
    folder = RunFolder.open(path)
    config = configs.load(folder.config, overrides)
    apply_config(folder, config)
    return folder, config


def apply_config(folder: RunFolder, config: Config) -> None:
    """Give the run this config from now on. Raises CannotResume as `reopen` does."""
    refuse_other_run(folder, config)
    _check_work_is_left(folder, config)
    write_atomically(folder.config, (config.model_dump_json(indent=2) + "\n").encode())


def refuse_other_run(folder: RunFolder, config: Config) -> None:
    """Raises CannotResume where a key differs from the run's config that makes it another run."""
    before = configs.load(folder.config)
    changed = sorted(_changed(before.model_dump(), config.model_dump()))
    if refused := [key for key in changed if not key.startswith(CHANGEABLE)]:
        raise CannotResume(
            f"{refused[0]} cannot change in a run that is resumed: the steps it has made and those that are left would "
            f"not belong to one run. Leave it as it is, or start a new run from these weights "
            f"(model.path={folder.checkpoints}/final)"
        )


def _check_work_is_left(folder: RunFolder, config: Config) -> None:
    if not folder.journal.exists():
        raise CannotResume(f"{folder.path} has no journal.sqlite: the run never began; start a new one")
    with closing(Journal(folder.journal)) as journal:
        step, train_s = journal.last_step(), journal.train_s()
        measured = {one.set_name for one in journal.evaluations() if one.policy_version == step}
    if not (measured >= set(config.eval_sets) and (folder.checkpoints / "final").is_dir()):
        return
    limits = config.train
    if step >= limits.steps:
        raise CannotResume(f"{folder.path} is over: {step} of {limits.steps} steps. To continue, give train.steps=N")
    if limits.max_minutes is not None and train_s >= 60 * limits.max_minutes:
        raise CannotResume(
            f"{folder.path} is over: the {limits.max_minutes:g} minutes of train.max_minutes were used up. To "
            "continue, give train.max_minutes=N, counted from the beginning of the run"
        )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the leaves that differ."""
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"
