"""Whether the files of a model folder are whole: reads JSON, and the headers of safetensors files. Loads no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
MAX_NAMED = 3


def check_files(folder: Path) -> None:
    """Raises ConfigError, which names every file that is missing, empty, cut off, or only a git-lfs pointer.

    Example:
        check_files(Path("models/qwen3-1.7b"))
    """
    problems = list(_problems(folder))
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more files" if len(problems) > MAX_NAMED else ""
        raise ConfigError(f"model.path={folder}: {'; '.join(problems[:MAX_NAMED])}{more}")


def why_no_folder(path: Path) -> str:
    """Why an existing file or folder is no model folder, and what to give instead: the end of a sentence about it."""
    if path.is_file():
        return "is a file; give the folder that it is in"
    names = [file.name for pattern in WEIGHTS for file in sorted(path.glob(pattern))]
    if names:
        return f"has weights ({names[0]}) and no {CONFIG}; copy the whole folder, with the tokenizer's files"
    inside = [folder for folder in sorted(path.iterdir()) if (folder / CONFIG).is_file()]
    if inside:
        return f"has no {CONFIG}, but {inside[0]} has one; give that"
    return f"is a folder without a {CONFIG}"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises ConfigError, which says how to get the file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    if reason := _no_content(data):
        raise ConfigError(f"{file} {reason}")
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); copy or download it again") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, and the config of a model is an object")
    return tree


def _problems(folder: Path) -> Iterator[str]:
    """A phrase for each file that is not whole."""
    read_json(folder / CONFIG)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        if reason := _broken_safetensors(file):
            yield f"{file.name} {reason}"
    if (folder / INDEX).is_file():
        yield from _missing_shards(folder)
    elif not files and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        yield f"has a {CONFIG} but no weights; copy the whole folder"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield "has no tokenizer.json; copy the tokenizer's files of this model too"


def _missing_shards(folder: Path) -> Iterator[str]:
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        yield f"{INDEX} has no weight_map; download it again"
        return
    names = sorted({str(name) for name in shards.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        yield f"{missing[0]} is missing, {len(missing)} of {len(names)} files of {INDEX}; download the rest"


def _broken_safetensors(file: Path) -> str | None:
    """What is wrong with the file, by its size and its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as start:
            if reason := _no_content(start.read(len(LFS_POINTER))):
                return reason
        with safe_open(file, framework="numpy"):
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except SafetensorError as error:
        return f"is cut off or damaged ({error}), {file.stat().st_size:,} bytes; download it again"


def _no_content(data: bytes) -> str | None:
    """Why there is nothing in a file that begins like this."""
    if not data.strip():
        return "is empty; copy or download it again"
    if data.startswith(LFS_POINTER):
        return "is a git-lfs pointer, not the file; run `git lfs pull` in its folder"
    return None
