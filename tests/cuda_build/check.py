"""Installs the CUDA build into an environment of its own, runs probe.py and the contract tests in it, and records that.

    make check-cuda

Needs no GPU. The environment (9 GB) is kept outside of the checkout under the hash of its lock, so that the download of
4 GB happens once per lock; AGENTRL_CUDA_ENV names another folder.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cuda_build.command_lines import ROOT, arguments, command_lines

LOCK = ROOT / "requirements" / "lock-gpu.txt"
RECORD = Path(__file__).with_name("record.json")
STUB = Path(__file__).with_name("libcuda.c")
CONTRACT_TESTS = "tests/agentrl/engine/vllm/test_contract.py"
INSTALL_S, PROBE_S = 3600.0, 600.0


def lock_hash() -> str:
    """Of the pins in lock-gpu.txt, whatever its comments say."""
    pins = sorted(line for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
    return hashlib.sha256("\n".join(pins).encode()).hexdigest()[:16]


def environment() -> Path:
    """The folder of the CUDA build's environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("AGENTRL_CUDA_ENV") or cache / "agentrl" / f"cuda-{lock_hash()}")


def is_installed() -> bool:
    """Whether the environment is there, with what the lock has now."""
    marker = environment() / ".lock"
    return marker.is_file() and marker.read_text() == lock_hash()


def install() -> None:
    """Install, or only take this checkout into an environment that is there. Raises CalledProcessError."""
    folder = environment()
    if not is_installed():
        folder.parent.mkdir(parents=True, exist_ok=True)
        script = ["bash", str(ROOT / "requirements" / "install.sh"), str(folder)]
        subprocess.run(script, env={**os.environ, "AGENTRL_BUILD": "cuda"}, timeout=INSTALL_S, check=True)
        (folder / ".lock").write_text(lock_hash())
    _run("-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "-e", str(ROOT), libraries=folder)


def probe() -> dict[str, Any]:
    """What probe.py prints. Raises CalledProcessError."""
    return _with_stub("-m", "tests.cuda_build.probe")[1]


def contract_tests() -> int:
    """How many passed. Raises CalledProcessError when one fails."""
    said, _ = _with_stub("-m", "pytest", "-q", "-n", "0", "-p", "tests.cuda_build.probe", CONTRACT_TESTS)
    passed = re.search(r"(\d+) passed", said)
    assert passed, said
    return int(passed[1])


def _with_stub(*command: str) -> tuple[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        compile_stub = ["gcc", "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", str(STUB)]
        subprocess.run(compile_stub, timeout=60, check=True)
        said = _run(*command, libraries=Path(folder))
    last = said.strip().splitlines()[-1]
    return said, json.loads(last) if last.startswith("{") else None


def _run(*command: str, libraries: Path) -> str:
    """Output of the environment's python, which sees no GPU even where there is one."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": ""}
    python = str(environment() / "bin" / "python")
    done = subprocess.run(
        [python, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
    done.check_returncode()
    return done.stdout


def main() -> None:
    """Check everything and write the record; raises, and leaves the record as it is, where something fails."""
    if shutil.which("gcc") is None:
        sys.exit("check-cuda: gcc is needed for libcuda.c: sudo apt-get install -y gcc libc6-dev")
    install()
    record = {
        "lock": lock_hash(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "arguments": arguments(list(command_lines())),
        **probe(),
        "contract_tests_passed": contract_tests(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(
        f"check-cuda: {len(record['resolved'])} command lines resolved; {RECORD.relative_to(ROOT)} written\n"
    )


if __name__ == "__main__":
    main()
