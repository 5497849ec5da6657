"""Writes weights into folders: versions for the engines, complete Hugging Face folders for people.

A folder appears whole or not at all. Large models are written shard by shard, so host memory never holds more than one
shard. Independent of HTTP and training.
"""

from __future__ import annotations

import copy
import json
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from torch import Tensor

from agentrl.engine.checksum import Checksum
from agentrl.training.model_folder import Origin, write_origin
from agentrl.types import Probe, WeightsRef
from trainer import lora
from trainer.weights.source import TensorMeta, WeightSource, layer_of
from trainer.whole_folder import remove_unfinished, whole_folder

MAX_SHARD_BYTES = 2**30
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FOLDER = "adapter"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def publish(
    source: WeightSource, root: Path, *, policy_version: int, probe: Probe, max_shard_bytes: int = MAX_SHARD_BYTES
) -> WeightsRef:
    """Write `root/v<version>-<id>/model*.safetensors`; keep this folder and the one before, which engines hold.

    Called on one rank; the others call `source.take_part()`. The id is new each time: a learner that was restarted
    makes a version again, and a network file system may still show another machine the old content of the same path.
    """
    folder = new_folder(root, policy_version)
    before = max(published(root), key=lambda path: path.stat().st_mtime_ns, default=None)
    with whole_folder(folder) as temporary:
        checksum = save(source.metadata(), source, temporary, max_shard_bytes)
    keep_only(root, {folder} if before is None else {folder, before})
    return WeightsRef(
        policy_version=policy_version,
        num_bytes=checksum.num_bytes,
        update_info={"path": str(folder)},
        checksum=checksum.hexdigest(),
        probe=probe,
    )


def new_folder(root: Path, version: int) -> Path:
    """The path of a publication that is about to be written."""
    return root / f"v{version}-{secrets.token_hex(4)}"


def published(root: Path) -> list[Path]:
    """The folders of all publications that are there."""
    return [path for path in root.glob("v*") if path.name[1:].partition("-")[0].isdecimal()]


def keep_only(root: Path, folders: Collection[Path]) -> None:
    """Remove all other publications, and what killed writers left."""
    for old in published(root):
        if old not in folders:
            shutil.rmtree(old)
    remove_unfinished(root, "v*")


def export(
    source: WeightSource,
    model: Any,
    model_path: str,
    folder: Path,
    *,
    origin: Origin,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a complete Hugging Face folder: weights, config and the tokenizer of `model_path`. Replaces an older one.

    `origin` is written beside them, so that whoever plays with the model knows its version.

    For a model with adapters the weights are merged, and `folder/adapter` is PEFT's own folder. Called on one rank; the
    others call `source.take_part()`.
    """
    base = lora.base_of(model)
    adapters: dict[str, lora.Adapter] = {}
    with whole_folder(folder) as temporary:
        save(source.metadata(), source.keeping(adapters), temporary, max_shard_bytes)
        if adapters:
            lora.save(model, adapters, temporary / ADAPTER_FOLDER)
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        config.save_pretrained(temporary)
        write_origin(temporary, origin)
        if (generation := getattr(base, "generation_config", None)) is not None:
            generation.save_pretrained(temporary)
        if Path(model_path).is_dir():
            _copy_missing(Path(model_path), temporary)
        else:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(model_path).save_pretrained(temporary)


def save(
    metadata: Sequence[TensorMeta], named: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> Checksum:
    """Write these tensors, which `metadata` describes in their order, with an index if there are several files."""
    from safetensors.torch import save_file

    sizes = _shard_sizes(metadata, max_shard_bytes)
    checksum = Checksum()
    tensors = checksum.through(named)
    file_of: dict[str, str] = {}
    for at, num_tensors in enumerate(sizes, start=1):
        file = f"model-{at:05d}-of-{len(sizes):05d}.safetensors" if len(sizes) > 1 else "model.safetensors"
        shard = {name: tensor.cpu().contiguous() for name, tensor in islice(tensors, num_tensors)}
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
    surplus = [name for name, _ in tensors]  # iterates to the end, where the last layer is dropped
    assert not surplus, f"tensors without metadata: {surplus}"
    if len(sizes) > 1:
        index = {"metadata": {"total_size": checksum.num_bytes}, "weight_map": file_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    return checksum


def _shard_sizes(metadata: Sequence[TensorMeta], max_shard_bytes: int) -> list[int]:
    """Number of tensors of each file. A layer is never divided, so one that is too large gets a file of its own."""
    sizes, free_bytes = [0], max_shard_bytes
    for _, group in groupby(metadata, key=lambda meta: layer_of(meta.name)):
        layer = list(group)
        layer_bytes = sum(meta.num_bytes for meta in layer)
        if layer_bytes > free_bytes and sizes[-1]:
            sizes.append(0)
            free_bytes = max_shard_bytes
        sizes[-1] += len(layer)
        free_bytes -= layer_bytes
    return sizes


def _copy_missing(source: Path, target: Path) -> None:
    """Copy every file that is neither weights nor written already: tokenizer, chat template, license."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
