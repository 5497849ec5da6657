"""Keeps the weights of a version that is evaluated beside training: the learner deletes its folders two steps later.

First as links beside the learner's folders, which takes no time and no space; then as files in the run's folder, from
which a run that resumes repeats the evaluation. Independent of engines and of the learner.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from agentrl.errors import EngineError
from agentrl.run_folder import RunFolder, write_atomically
from agentrl.types import WeightsRef


def linked(ref: WeightsRef) -> WeightsRef:
    """The same weights in folders of their own beside the learner's: as links, or as copies where there are none.

    Raises EngineError where this machine does not see the learner's folders.

        pinned = linked(ref)  # ref.path may be deleted now
    """
    if ref.path is None:
        raise EngineError(f"version {ref.policy_version} is in no folder, from which eval.engines could take it")
    try:
        # The learner deletes only folders named v*, and the run deletes all of them when it ends.
        return _copied(ref, Path(ref.path).parent / f"evaluated-{ref.policy_version}")
    except OSError as error:
        raise EngineError(
            f"the weights of version {ref.policy_version} cannot be kept for an evaluation beside training: {error}. "
            "Orchestrator, learner and engines must see one folder; with eval.engines=0 training waits instead"
        ) from error


class KeptWeights:
    """The weights that are evaluated now, in `checkpoints/evaluated` of the run.

    Example:
        kept = KeptWeights(run)
        ref = kept.keep(linked(ref))
        kept.evaluated()  # a run that resumes from here on does not repeat it
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._root = (run.checkpoints / "evaluated").resolve()
        self._begun = self._root / "weights.json"

    def keep(self, pinned: WeightsRef) -> WeightsRef:
        """Move the weights that `linked` returned into the run's folder. Raises DiskError."""
        with self._run.writing(self._root):
            kept = _copied(pinned, self._root / f"v{pinned.policy_version}")
            write_atomically(self._begun, msgspec.json.encode(kept))
        shutil.rmtree(_folder(pinned), ignore_errors=True)
        return kept

    def unfinished(self) -> WeightsRef | None:
        """The weights of an evaluation that a crash cut short; None where there is none, or they are gone."""
        with suppress(OSError, msgspec.MsgspecError):
            ref = msgspec.json.decode(self._begun.read_bytes(), type=WeightsRef)
            here = _moved(ref, self._root / _folder(ref).name)  # the run's folder may have been moved
            if all(path.is_dir() for path in _paths(here)):
                return here
        return None

    def evaluated(self) -> None:
        """The evaluation of the kept weights is stored. They stay: an engine that is restarted takes them again."""
        self._begun.unlink(missing_ok=True)

    def drop_others(self, kept: WeightsRef) -> None:
        """Delete older weights: the engines hold `kept`."""
        for folder in self._root.glob("v*"):
            if folder != _folder(kept):
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Delete all: no engine needs them any more."""
        shutil.rmtree(self._root, ignore_errors=True)


def _copied(ref: WeightsRef, target: Path) -> WeightsRef:
    shutil.rmtree(target, ignore_errors=True)  # a crash may have left a part
    moved = _moved(ref, target)
    for old, new in zip(_paths(ref), _paths(moved), strict=True):
        shutil.copytree(old, new, copy_function=_link_or_copy)
    return moved


def _paths(ref: WeightsRef) -> list[Path]:
    """The folder with all weights, and those with what changed since."""
    return [Path(ref.update_info["path"]), *map(Path, ref.update_info.get("deltas", ()))]


def _moved(ref: WeightsRef, target: Path) -> WeightsRef:
    """`ref` with its folders in `target`."""
    whole, *deltas = (str(target / str(number)) for number, _ in enumerate(_paths(ref)))
    return replace(ref, update_info={"path": whole, "deltas": deltas} if deltas else {"path": whole})


def _folder(ref: WeightsRef) -> Path:
    return _paths(ref)[0].parent


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
