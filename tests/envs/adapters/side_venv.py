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
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    commands: list[list[str]] = [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), *install, "--only-binary", ":all:", "-r", str(requirements)],
        [str(folder / "bin" / "python"), "-c", imports],
    ]
    compiling = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, env=compiling)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{folder.name}: its virtual environment cannot be made: {error.stderr.strip()[-400:]}")
        except (subprocess.TimeoutExpired, OSError) as error:
            pytest.skip(f"{folder.name}: its virtual environment cannot be made: {error}")
