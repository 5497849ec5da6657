"""Folders that appear whole or not at all. The one writer of folders in the trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING, REPLACED = ".writing", ".replaced"


def unfinished(folder: Path) -> Path:
    """Where the content of `folder` is written before it is renamed: a hidden sibling."""
    return folder.with_name(f".{folder.name}{WRITING}")


@contextmanager
def whole_folder(folder: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into. It replaces `folder` when the block ends, and is removed if the block raises.

    A folder that is there already is replaced as a whole. What a killed process left unfinished is removed first.

    Args:
        is_durable: flush every file to the disk before the rename, so that the folder survives a power failure.

    Example::

        with whole_folder(Path("out/v3")) as folder:
            (folder / "model.bin").write_bytes(data)
    """
    temporary = unfinished(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if is_durable:
            flush(temporary)
        _replace(temporary, folder, is_durable=is_durable)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_unfinished(root: Path, pattern: str) -> None:
    """Remove what killed writers of folders `root/pattern` left behind."""
    for suffix in (WRITING, REPLACED):
        for path in root.glob(f".{pattern}{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def flush(folder: Path) -> None:
    """Force the folder's files and directories to the disk."""
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _replace(temporary: Path, folder: Path, *, is_durable: bool) -> None:
    replaced = folder.with_name(f".{folder.name}{REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    if is_durable:
        _fsync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
