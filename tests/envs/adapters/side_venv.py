"""Virtual environments for packages that must not enter ours: made once, from pinned wheels, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKE_TIMEOUT_S = 170


def python_of(name: str, *, imports: str) -> Path:
    """The interpreter of `.venv-adapters/NAME`, with what NAME-requirements.txt pins. Skips where it cannot be made.

    `imports` is a program that imports what will be used: only that is compiled, and only once.
    """
    requirements = Path(__file__).with_name(f"{name}-requirements.txt")
    folder = ROOT / ".venv-adapters" / name
    folder.parent.mkdir(exist_ok=True)
    mark = folder / "made-of"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.is_file() or mark.read_text() != wanted:
            _make(folder, requirements, imports)
            mark.write_text(wanted)
    return folder / "bin" / "python"


def _make(folder: Path, requirements: Path, imports: str) -> None:
    """With uv, in seconds; where it fails with pip, which on some machines is told of other indexes than PyPI."""
    wheels = ["--no-deps", "--only-binary", ":all:", "-r", str(requirements)]
    python = str(folder / "bin" / "python")
    uv = [sys.executable, "-m", "uv"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    try:
        _run([*uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)])
        _run([*uv, "pip", "install", "-q", "--python", python, *wheels])
    except subprocess.SubprocessError:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], or_skip=folder.name)
        _run([*pip, "install", "-q", "--no-compile", *wheels], or_skip=folder.name)
    _run([python, "-c", imports], or_skip=folder.name)


def _run(command: list[str], *, or_skip: str | None = None) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, env=compiling)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        if or_skip is None:
            raise
        why = error.stderr.strip()[-400:] if isinstance(error, subprocess.CalledProcessError) else error
        pytest.skip(f"{or_skip}: its virtual environment cannot be made: {why}")
