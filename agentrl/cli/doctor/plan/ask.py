"""Asks `python -m trainer.plan` for the learner's half of a plan, in a process of its own: it imports torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentrl.cli.doctor.plan.records import LearnerNeeds
from agentrl.config import Config
from agentrl.engine import hub
from agentrl.errors import ConfigError
from agentrl.supervision.child import module_command

DEADLINE_S = 300.0
MODULE = "trainer.plan"
FIX = "give its config.json with --model-config FILE, or download it where there is a network: `hf download {name}`"


def model_config_file(config: Config, given: Path | None) -> Path | None:
    """The model's config.json: `given`, in `model.path`, in the hub's cache, or from the hub.

    None where the warm start would make the model. Raises ConfigError, which says what to do.
    """
    if given is not None:
        file = given / "config.json" if given.is_dir() else given
        if not file.is_file():
            raise ConfigError(f"--model-config {given}: there is no such file")
        return file
    folder = Path(config.model.path)
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if config.model.warmstart is not None:
        return None
    if folder.is_dir() or folder.is_absolute():
        raise ConfigError(f"model.path={folder} has no config.json here: {FIX.format(name='NAME')}")
    name = config.model.path
    found = hub.file_of(name, "config.json")
    if found is None:
        raise ConfigError(
            f"model.path={name}: config.json is neither here nor on the hub, or the hub does not answer: "
            + FIX.format(name=name)
        )
    return found


def learner_needs(
    configs: Sequence[Config], *, model_config: Path | None, timeout_s: float = DEADLINE_S
) -> list[LearnerNeeds]:
    """What one rank of each config needs. The configs share one model. Raises ConfigError."""
    command = module_command(MODULE) + (["--model-config", str(model_config)] if model_config else [])
    asked = msgspec.json.encode([config.model_dump(mode="json") for config in configs])
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the learner's memory was not computed within {timeout_s:g} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"the learner's memory cannot be computed: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=list[LearnerNeeds])
