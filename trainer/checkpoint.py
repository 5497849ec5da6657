"""Saves the learner's whole state in a folder and loads it: a resumed run is bit-identical to one that never stopped.

The state is the trained weights and the optimizer as DeepSpeed saves them, the random state of every rank, and the
learner's own numbers. A folder appears whole or not at all. Independent of batches, weight transfer and the rest of a
run.

DeepSpeed's files are pickles, which can run code when they are loaded: load only checkpoints that you saved.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from agentrl.errors import ConfigError, LearnerError, boundary
from trainer import ranks
from trainer.learner import Learner
from trainer.whole_folder import remove_unfinished, unfinished, whole_folder

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
DEEPSPEED_TAG = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What must be the same when a checkpoint is loaded: DeepSpeed's files depend on it.

    Example: `Setup(num_ranks=2, zero_stage=1, dtype="bfloat16", weights="9f2c...", frozen="")`.
    """

    num_ranks: int
    zero_stage: int
    dtype: str
    weights: str  # digest of the weights' names and shapes, and of which are trained
    frozen: str  # model.path, from which untrained weights are loaded again; empty if all are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's folder. Written last: a folder without it is incomplete.

    Example: `Manifest(format=FORMAT, setup=setup, learner=learner.state_dict(), num_bytes={"a.pt": 120})`.
    """

    format: int
    setup: Setup
    learner: dict[str, Any]  # Learner.state_dict
    num_bytes: dict[str, int]  # of every other file, by its path in the folder


def save(learner: Learner, root: Path, *, keep: int) -> Path:
    """Write `root/v<policy_version>`, then remove all but the `keep` newest up to it. Every rank must call it.

    Raises LearnerError if it cannot be written; earlier checkpoints are not touched then.
    """
    folder = root / f"v{learner.policy_version}"
    is_first = ranks.is_first()
    with boundary(LearnerError, f"writing the checkpoint {folder}"):
        # A run that was resumed before this version writes it again: the folder may exist.
        with whole_folder(folder, is_durable=True) if is_first else nullcontext(unfinished(folder)) as temporary:
            ranks.barrier()
            learner.engine.save_checkpoint(
                str(temporary), tag=DEEPSPEED_TAG, save_latest=False, exclude_frozen_parameters=True
            )
            torch.save(_random_state(), temporary / _rank_file())
            ranks.barrier()
            if is_first:
                _write_manifest(learner, temporary)
        if is_first:
            _rotate(root, keep, version=learner.policy_version)
        ranks.barrier()
    return folder


def load(learner: Learner, path: Path) -> Path:
    """Load `path`, a checkpoint or a folder of checkpoints (then the newest), into `learner`. Every rank must call it.

    Settings of the config (learning rate, `rho_base` given as a number) override the saved ones. Returns the
    checkpoint's folder. Raises ConfigError if it is missing, incomplete or of another setup; nothing is changed then.
    """
    folder = newest(path)
    manifest = _whole_manifest(folder)
    _check_setup(folder, manifest.setup, _setup_of(learner))
    with boundary(LearnerError, f"reading the checkpoint {folder}"):
        found, _ = learner.engine.load_checkpoint(
            str(folder),
            tag=DEEPSPEED_TAG,
            load_module_strict=not manifest.setup.frozen,
            load_lr_scheduler_states=False,
        )
        assert found is not None, "DeepSpeed found none of its files"
        _restore_random_state(torch.load(folder / _rank_file(), weights_only=True))
    learner.load_state_dict(manifest.learner)
    log.info("resumed at version %d from %s", learner.policy_version, folder)
    return folder


def newest(path: Path) -> Path:
    """`path` if it is a checkpoint's folder; else the newest checkpoint in it. Raises ConfigError if there is none."""
    if _version_of(path) is not None or (path / MANIFEST).exists():
        return path
    folders = sorted(_checkpoints(path), key=_version_or_zero)
    if not folders:
        raise ConfigError(f"{path}: no checkpoint of a learner there; give a folder v<version>, or its parent folder")
    return folders[-1]


def oldest_version(root: Path) -> int | None:
    """The version of the oldest checkpoint in `root`; None if there is none."""
    return min(map(_version_or_zero, _checkpoints(root)), default=None)


def _whole_manifest(folder: Path) -> Manifest:
    """Raises ConfigError, saying how to fix it, if a file is missing or has another size."""
    others = [str(other) for other in _checkpoints(folder.parent) if other != folder and (other / MANIFEST).exists()]
    fix = f"delete it, and resume from {' or '.join(others)}" if others else "there is no other checkpoint beside it"
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder} is an incomplete checkpoint: {MANIFEST}: {error.strerror}; {fix}") from error
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} was not written by this version of agentrl: {MANIFEST}: {error}; {fix}") from error
    if manifest.format != FORMAT:
        raise ConfigError(f"{folder} has format {manifest.format}, this version of agentrl reads {FORMAT}; {fix}")
    for name, num_bytes in manifest.num_bytes.items():
        file = folder / name
        present = file.stat().st_size if file.exists() else 0
        if present != num_bytes:
            raise ConfigError(f"{folder} is incomplete: {name} has {present} of {num_bytes} bytes; {fix}")
    return manifest


def _check_setup(folder: Path, saved: Setup, present: Setup) -> None:
    keys = {"num_ranks": "learner.num_ranks", "zero_stage": "learner.zero_stage", "dtype": "model.dtype"}
    if saved.frozen and present.frozen:
        keys["frozen"] = "model.path"
    for name, key in keys.items():
        theirs, ours = getattr(saved, name), getattr(present, name)
        if theirs != ours:
            raise ConfigError(
                f"{folder} was saved with {key}={theirs}, this learner has {ours}: start with {theirs}, or begin a new "
                "run from the weights that the old run exported"
            )
    if saved.weights != present.weights:
        raise ConfigError(
            f"{folder} was saved from another model: its weights have other names or shapes; set model.path"
        )


def _setup_of(learner: Learner) -> Setup:
    digest = hashlib.sha256()
    is_whole = all(weight.requires_grad for weight in learner.model.parameters())
    for name, weight in learner.model.named_parameters():
        digest.update(f"{name} {tuple(ranks.whole_shape(weight))} {weight.requires_grad}\n".encode())
    return Setup(
        num_ranks=ranks.count(),
        zero_stage=learner.config.learner.zero_stage,
        dtype=str(next(learner.model.parameters()).dtype).removeprefix("torch."),
        weights=digest.hexdigest(),
        frozen="" if is_whole else learner.config.model.path,
    )


def _write_manifest(learner: Learner, folder: Path) -> None:
    manifest = Manifest(
        format=FORMAT,
        setup=_setup_of(learner),
        learner=learner.state_dict(),
        num_bytes={str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)},
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _rotate(root: Path, keep: int, *, version: int) -> None:
    """Later versions are removed too: they belong to a run that was then resumed from an earlier version."""
    by_version = {_version_or_zero(folder): folder for folder in _checkpoints(root)}
    kept = sorted(number for number in by_version if number <= version)[-keep:]
    for number in by_version.keys() - kept:
        shutil.rmtree(by_version[number])
    remove_unfinished(root, "v*")


def _checkpoints(root: Path) -> list[Path]:
    return [path for path in root.glob("v*") if _version_of(path) is not None]


def _version_of(path: Path) -> int | None:
    return int(path.name[1:]) if path.name.startswith("v") and path.name[1:].isdecimal() else None


def _version_or_zero(path: Path) -> int:
    return _version_of(path) or 0


def _rank_file() -> str:
    return f"rank_{ranks.index()}.pt"


def _random_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
