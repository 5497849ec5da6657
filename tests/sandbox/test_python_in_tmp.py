"""A Python installed below /tmp, which every session replaces by a folder of its own, still works inside."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from sandbox.client import SandboxClient

async def main():
    async with SandboxClient.embedded(slots=1) as client, client.session() as session:
        # wave is in the standard library and not imported yet
        print((await session.exec("import wave, sys; open('/tmp/mine', 'w').close(); print(sys.prefix)")).stdout)

asyncio.run(main())
"""


def test_sessions_run_a_python_below_tmp(tmp_path: Path) -> None:
    home = tmp_path / "venv"
    if not str(home).startswith("/tmp/"):
        pytest.skip("temporary files do not lie below /tmp here")
    venv.create(home, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [sysconfig.get_path("purelib"), str(Path(__file__).parent.parent.parent)]
    (home / "lib" / version / "site-packages" / "all.pth").write_text("\n".join(paths))
    done = subprocess.run(
        [home / "bin" / "python", "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.strip() == str(home), done.stderr
