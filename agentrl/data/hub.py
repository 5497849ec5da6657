"""Finds the files of a data set on this disk: a file, a folder in hub layout, or a set of the Hugging Face hub.

Independent of the contents of the files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl

from agentrl.errors import ConfigError

OPTIONS = ("config", "split", "revision", "files", "problem", "answer", "id")
HUB_TIMEOUT_S = 10.0
SUFFIXES = (".jsonl", ".parquet")
SPLITS = {
    "train": ("train",),
    "test": ("test", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """The files to read, in order, and the options that were given with the name.

    Example:
        locate("hf:openai/gsm8k?config=main", split="test").files
    """

    name: str  # as the user wrote it
    files: tuple[Path, ...]
    hub_name: str | None = None  # the data set's own name, without its owner
    options: Mapping[str, str] = field(default_factory=dict)


def locate(data: str | Path, *, split: str) -> DataFiles:
    """Find the files of `data`. Downloads files of the hub that are not in its cache.

    `path/to/rows.jsonl`, `path/to/rows.parquet`, `path/to/folder`, `hf:owner/name` (or `owner/name` where no such path
    exists), each with options: `hf:openai/gsm8k?config=main&split=test`.

        config, split       which files of a folder or data set: those whose names or folders contain these words
        files               selects by a pattern instead, such as data/*.parquet
        revision            branch, tag or commit of the hub
        problem, answer, id names of columns, for the reader of the rows

    Raises ConfigError.
    """
    name = str(data)
    if Path(name).is_file():
        return DataFiles(name=name, files=(Path(name),))
    base, _, query = name.partition("?")
    options = _options(query, name)
    path = Path(base)
    if path.is_dir():
        inside = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
        chosen = choose(inside, options, split=split, name=name)
        return DataFiles(name=name, files=tuple(path / file for file in chosen), options=options)
    is_hub = base.startswith("hf:") or (
        not path.exists() and path.suffix not in SUFFIXES and _HUB_NAME.fullmatch(base) is not None
    )
    if not is_hub:
        return DataFiles(name=name, files=(path,), options=options)
    repo = base.removeprefix("hf:").strip("/")
    if not _HUB_NAME.fullmatch(repo):
        raise ConfigError(f"{name!r} is not the name of a data set: write hf:owner/name, with options after a '?'")
    files = _download(repo, options, split, name)
    return DataFiles(name=name, files=files, hub_name=repo.split("/")[1], options=options)


def choose(files: Sequence[str], options: Mapping[str, str], *, split: str, name: str) -> list[str]:
    """The files of a data set that the options and the split select. Raises ConfigError, listing the files."""
    split = options.get("split", split)
    readable = sorted(file for file in files if file.endswith(SUFFIXES) and not file.startswith("."))
    if "files" in options:
        chosen = [file for file in readable if fnmatch(file, options["files"])]
        if not chosen:
            raise ConfigError(f"{name}: no file matches {options['files']}; there are: {_listed(readable)}")
        _check_complete(chosen, name)
        return chosen
    if "config" in options:
        readable = [file for file in readable if options["config"] in _words(file) | set(PurePosixPath(file).parts)]
    chosen = [file for file in readable if _split_of(file) in SPLITS.get(split, (split,)) or split in _words(file)]
    if not chosen and split == "train" and not any(_split_of(file) for file in readable):
        chosen = readable  # files without the name of a split are for training
    if not chosen:
        raise ConfigError(
            f"{name}: no .jsonl or .parquet file of split {split!r}; there are: {_listed(readable or sorted(files))}. "
            "Choose with ?config=..., ?split=... or ?files=PATTERN"
        )
    folders = sorted({str(PurePosixPath(file).parent) for file in chosen})
    if len(folders) > 1:
        raise ConfigError(
            f"{name}: split {split!r} is in several folders: {_listed(folders)}; choose one with ?config=NAME"
        )
    _check_complete(chosen, name)
    return chosen


def _options(query: str, name: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, separator, value = part.partition("=")
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, n=1)
            raise ConfigError(f"{name}: unknown option {key!r}; {_known(near)}")
        if not separator or not value:
            raise ConfigError(f"{name}: option {key!r} needs a value: {key}=...")
        options[key] = parse_qsl(f"x={value}")[0][1]
    return options


def _known(near: Sequence[str]) -> str:
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OPTIONS)}"


def _words(file: str) -> set[str]:
    path = PurePosixPath(file)
    return set(re.split(r"[-_.]", path.stem)) | set(path.parts[:-1])


def _split_of(file: str) -> str:
    """The word in a file's name or folders that names a split; empty without one."""
    words = _words(file)
    return next((word for known in SPLITS.values() for word in known if word in words), "")


def _download(repo: str, options: Mapping[str, str], split: str, name: str) -> tuple[Path, ...]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    revision = options.get("revision")
    try:
        chosen = choose(_inside(repo, revision), options, split=split, name=name)
        folder = snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=chosen)
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is not the name of a data set: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{name}: the hub has no such data set or revision, or requires a login "
            f"(HTTP {error.response.status_code}); a private one needs HF_TOKEN"
        ) from error
    except _Unreachable as error:
        cached = _cached(repo, revision)
        if cached is None:
            raise ConfigError(
                f"{name}: no such path here, and the hub cannot be reached ({error}). "
                "Download the files elsewhere and give a .jsonl, .parquet, or folder"
            ) from error.__cause__
        folder = str(cached)
        inside = [str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file()]
        chosen = choose(inside, options, split=split, name=name)
    return tuple(Path(folder, file) for file in chosen)


class _Unreachable(Exception):
    """The hub cannot be reached; its cache may still have the files."""


def _inside(repo: str, revision: str | None) -> list[str]:
    """The files of a data set. Raises the hub's errors, _Unreachable."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        raise
    except Exception as error:  # the hub's client may raise the errors of any HTTP library
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        raise _Unreachable(f"{type(error).__name__}: {error}") from error
    return [sibling.rfilename for sibling in info.siblings or []]


def _cached(repo: str, revision: str | None) -> Path | None:
    """The folder of a revision in the hub's cache, which may contain only some of its files."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    wanted = revision or "main"
    revisions = [r for known in repos if (known.repo_type, known.repo_id) == ("dataset", repo) for r in known.revisions]
    return next((r.snapshot_path for r in revisions if wanted in r.refs or wanted == r.commit_hash), None)


def _check_complete(files: Sequence[str], name: str) -> None:
    """Check that all shards are there: X-00000-of-00007 needs seven files. Raises ConfigError."""
    numbered = [match for file in files if (match := _SHARD.search(file))]
    for total in {int(match[2]) for match in numbered}:
        there = {int(match[1]) for match in numbered if int(match[2]) == total}
        if missing := sorted(set(range(total)) - there):
            raise ConfigError(f"{name}: files {missing} of {total} are missing; download the set again")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"
