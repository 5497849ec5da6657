"""The learner's whole state in a folder, and back: a run that goes on from it is to the bit the one that never stopped.

The trained weights and the optimizer as DeepSpeed saves them, the random state of every rank, and the learner's own
numbers. A folder appears whole or not at all: it is written under another name, flushed to the disk, and renamed.
Knows nothing of batches, of weights for engines or people, or of the rest of a run.

DeepSpeed's files are pickles, which can run code when they are loaded: load only what you saved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import distributed

from agentrl.errors import ConfigError, LearnerError, boundary
from trainer.gradient.score_sums import full_shape

if TYPE_CHECKING:
    from trainer.learner import Learner

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
DEEPSPEED_TAG = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What must be the same when a checkpoint is loaded: by it DeepSpeed divides its files."""

    num_ranks: int
    zero_stage: int
    dtype: str
    weights: str  # digest of the weights' names, shapes, and which are trained
    frozen: str  # model.path, where the others come from again; empty where all are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is in the folder. Written last: a folder without one is no checkpoint."""

    format: int
    setup: Setup
    learner: dict[str, Any]  # Learner.state_dict
    num_bytes: dict[str, int]  # of every other file, by its path in the folder


def save(learner: Learner, root: Path, *, keep: int) -> Path:
    """Write `root/v<policy_version>`, then remove all but the `keep` newest up to it. Every rank calls it.

    Raises LearnerError when it cannot be written; what was there before stays.
    """
    folder = root / f"v{learner.policy_version}"
    temporary = root / f".{folder.name}.writing"
    is_first_rank = distributed.get_rank() == 0
    with boundary(LearnerError, f"writing the checkpoint {folder}"):
        if is_first_rank:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        distributed.barrier()
        learner.engine.save_checkpoint(
            str(temporary), tag=DEEPSPEED_TAG, save_latest=False, exclude_frozen_parameters=True
        )
        torch.save(_random_state(), temporary / _rank_file())
        distributed.barrier()
        if is_first_rank:
            _write_manifest(learner, temporary)
            _flush(temporary)
            _take_place(temporary, folder)
            _rotate(root, keep, version=learner.policy_version)
        distributed.barrier()
    return folder


def load(learner: Learner, path: Path) -> Path:
    """Give `learner` the state in `path`, a checkpoint, or a folder of them, of which the newest. Every rank calls it.

    What the config sets (learning rate, `rho_base` given as a number) is the config's. Returns the checkpoint's folder.
    Raises ConfigError when it is not there, not whole, or of another set-up; nothing was changed then.
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
    """`path` if it is a checkpoint's folder; else the newest checkpoint in it. Raises ConfigError without any."""
    if _version_of(path) is not None or (path / MANIFEST).exists():
        return path
    folders = sorted(_checkpoints(path), key=_version_or_zero)
    if not folders:
        raise ConfigError(f"{path}: no checkpoint of a learner there; give a folder v<version>, or the one with these")
    return folders[-1]


def oldest_version(root: Path) -> int | None:
    """The version of the oldest checkpoint in `root`; None without any."""
    return min(map(_version_or_zero, _checkpoints(root)), default=None)


def _whole_manifest(folder: Path) -> Manifest:
    """Raises ConfigError, with the mend, when anything that was written is not there."""
    others = [str(other) for other in _checkpoints(folder.parent) if other != folder and (other / MANIFEST).exists()]
    mend = f"delete it, and resume from {' or '.join(others)}" if others else "there is no other beside it"
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder} is no whole checkpoint: {MANIFEST}: {error.strerror}; {mend}") from error
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{folder} was not written by this version of agentrl: {MANIFEST}: {error}; {mend}"
        ) from error
    if manifest.format != FORMAT:
        raise ConfigError(f"{folder} has format {manifest.format}, this version of agentrl reads {FORMAT}; {mend}")
    for name, num_bytes in manifest.num_bytes.items():
        file = folder / name
        present = file.stat().st_size if file.exists() else 0
        if present != num_bytes:
            raise ConfigError(f"{folder} is torn: {name} has {present} of {num_bytes} bytes; {mend}")
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
                "run from the weights that the old one exported"
            )
    if saved.weights != present.weights:
        raise ConfigError(f"{folder} was saved from another model: its weights have other names or shapes; set model")


def _setup_of(learner: Learner) -> Setup:
    digest = hashlib.sha256()
    is_whole = all(weight.requires_grad for weight in learner.model.parameters())
    for name, weight in learner.model.named_parameters():
        digest.update(f"{name} {tuple(full_shape(weight))} {weight.requires_grad}\n".encode())
    return Setup(
        num_ranks=distributed.get_world_size(),
        zero_stage=learner.engine.zero_optimization_stage(),
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


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_place(temporary: Path, folder: Path) -> None:
    """Also of a checkpoint of the same version, which a run that was resumed before it makes again."""
    replaced = temporary.with_suffix(".replaced")
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    _fsync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _rotate(root: Path, keep: int, *, version: int) -> None:
    """Later versions are of a run that was resumed before them: what follows now is another story."""
    by_version = {_version_or_zero(folder): folder for folder in _checkpoints(root)}
    kept = sorted(number for number in by_version if number <= version)[-keep:]
    for number in by_version.keys() - kept:
        shutil.rmtree(by_version[number])
    for left_over in (*root.glob(".v*.writing"), *root.glob(".v*.replaced")):
        shutil.rmtree(left_over, ignore_errors=True)


def _checkpoints(root: Path) -> list[Path]:
    return [path for path in root.glob("v*") if _version_of(path) is not None]


def _version_of(path: Path) -> int | None:
    return int(path.name[1:]) if path.name.startswith("v") and path.name[1:].isdecimal() else None


def _version_or_zero(path: Path) -> int:
    return _version_of(path) or 0


def _rank_file() -> str:
    return f"rank_{distributed.get_rank()}.pt"


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
