"""Puts weights where others can read them: versions for the engine, Hugging Face folders for people.

A folder appears whole or not at all: it is written under another name and renamed. Knows no HTTP and no training.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.types import Probe, WeightsRef

WEIGHTS_FILE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def publish(
    model: Any,
    root: Path,
    *,
    policy_version: int,
    probe_ids: Sequence[int],
    score: Callable[[Sequence[int]], list[float]],
) -> WeightsRef:
    """Write `root/v<version>/model.safetensors` with Hugging Face's names; keep that and the version before.

    Args:
        probe_ids: a text of at least two tokens, scored with `score` under the very weights that are written.

    A version that was written already (a repeated call) is replaced.
    """
    folder = root / f"v{policy_version}"
    with _whole_folder(folder) as temporary:
        _save(model, temporary)
    _remove_versions_before(root, policy_version - 1)
    return WeightsRef(
        policy_version=policy_version,
        path=str(folder),
        num_bytes=(folder / WEIGHTS_FILE).stat().st_size,
        probe=Probe(token_ids=tuple(probe_ids), logprobs=tuple(score(probe_ids))),
    )


def export(model: Any, model_path: str, folder: Path) -> None:
    """A complete Hugging Face folder: weights, config and the tokenizer of `model_path`. Replaces an older export."""
    with _whole_folder(folder) as temporary:
        _save(model, temporary)
        if Path(model_path).is_dir():
            _copy_missing(Path(model_path), temporary)
        else:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(model_path).save_pretrained(temporary)


def _save(model: Any, folder: Path) -> None:
    # One file whatever the size: readers open model.safetensors, not an index.
    model.save_pretrained(folder, max_shard_size="1000GB")


def _copy_missing(source: Path, target: Path) -> None:
    """Everything that is not weights and not written already: tokenizer, chat template, licence."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _remove_versions_before(root: Path, oldest_kept: int) -> None:
    for folder in root.glob("v*"):
        if folder.name[1:].isdecimal() and int(folder.name[1:]) < oldest_kept:
            shutil.rmtree(folder)


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary sibling to write into; takes the place of `folder` at the end, or is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
