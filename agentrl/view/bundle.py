"""Copies of runs that open without a server: a folder with every document, or one file with a sample of the groups.

The folder's documents are scripts and not JSON files, because a page that was opened from a folder may load those only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder, write_atomically
from agentrl.view import shell
from agentrl.view.documents import Documents
from agentrl.view.run_reader import RunReader

MAX_SAMPLE_BYTES = 1_500_000
"""Of groups in one file, packed: the page and the tables come on top."""
MAX_REPORT_FILES = 200
"""Of each kind of episodes in report.html, so that a long run is not read whole when it ends."""
_OTHER_SIGNS = re.compile(r"[^A-Za-z0-9._/-]")


def write_bundle(documents: Documents, folder: Path) -> int:
    """Write the folder, new or empty; returns its size in bytes. Raises ConfigError where it cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--bundle: {folder} is there already, and not an empty folder: name another")
    size = 0

    def write(name: str, content: bytes) -> None:
        nonlocal size
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content, durable=False)
        size += len(content)

    try:
        write("index.html", shell.page_beside_files(source="files", title=", ".join(documents.readers)).encode())
        for name in shell.FILES:
            write(name, shell.file(name))
        for name in documents.names():
            try:
                content = documents.make(name)
            except KeyError:  # a group that cannot be read, or is gone by now; the page says so
                continue
            call = f"agentrlData({json.dumps(name)},{json.dumps(shell.packed(content))})\n"
            write(f"data/{file_name(name)}", call.encode())
    except OSError as error:
        raise ConfigError(f"--bundle: cannot write {folder}: {error.strerror or error}") from error
    return size


def write_one_file(documents: Documents, target: Path, *, max_bytes: int = MAX_SAMPLE_BYTES) -> tuple[int, int]:
    """Write one page that holds every table, and groups up to `max_bytes`; returns how many of how many groups.

    Raises ConfigError where it cannot be written.
    """
    page, num_held, num_groups = _one_file(documents, max_bytes)
    try:
        write_atomically(target, page)
    except OSError as error:
        raise ConfigError(f"--bundle: cannot write {target}: {error.strerror or error}") from error
    return num_held, num_groups


def write_report(run: RunFolder) -> Path:
    """Write the run's report.html, also for a run that is not over, with a sample of its episodes. Returns its path.

    Raises DiskError.
    """
    page, _, _ = _one_file(Documents([RunReader(run, max_files=MAX_REPORT_FILES)]), MAX_SAMPLE_BYTES)
    with run.writing(run.report):
        write_atomically(run.report, page)
    return run.report


def _one_file(documents: Documents, max_bytes: int) -> tuple[bytes, int, int]:
    """The page, and how many of how many groups it holds."""
    names = list(documents.names())
    groups = [name for name in names if "/group/" in name]
    held = {name: documents.make(name) for name in names if "/group/" not in name}
    size = 0
    for name in sampled(groups):
        try:
            content = documents.make(name)
        except KeyError:
            continue
        size += len(shell.packed(content))
        if size > max_bytes:
            break
        held[name] = content
    page = shell.page_in_one_file(held, title=", ".join(documents.readers))
    return page.encode(), sum("/group/" in name for name in held), len(groups)


def sampled(groups: Sequence[str]) -> list[str]:
    """RUN/group/KIND/STEP/ID in the order in which a sample takes them: one of each step, the last and first steps
    before those between; then another of each step.

    >>> sampled(["r/group/train/1/0", "r/group/train/1/1", "r/group/train/2/2", "r/group/train/3/3"])
    ['r/group/train/3/3', 'r/group/train/1/0', 'r/group/train/2/2', 'r/group/train/1/1']
    """
    steps: dict[str, list[str]] = {}
    for name in groups:
        steps.setdefault(name.rpartition("/")[0], []).append(name)
    by_kind: dict[str, list[list[str]]] = {}
    for step, members in steps.items():
        by_kind.setdefault(step.rpartition("/")[0], []).append(members)
    found = [
        (rank, min(place, len(kind) - 1 - place), -place, name)
        for kind in by_kind.values()
        for place, members in enumerate(kind)
        for rank, name in enumerate(members)
    ]
    return [name for *_, name in sorted(found, key=lambda one: one[:3])]


def file_name(name: str) -> str:
    """The file of a document; signs that a file system or an address may not take are written as _HEX_.

    >>> file_name("my run/episodes")
    'my_20_run/episodes.js'
    """
    return f"{_OTHER_SIGNS.sub(lambda found: f'_{ord(found[0]):x}_', name)}.js"
