"""Provides the tests with a Docker engine that has the sandbox's image: a running engine, or one started for them.

A script starts an engine and prints the exports a shell needs. DOCKER_HERE names the script; the default is the one
beside the checkout. `script FOLDER` starts the engine, `script --stop FOLDER` stops it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGE = "agentrl-sandbox"
START_DEADLINE_S = 300
BUILD_DEADLINE_S = 300
# The engine needs these to create its networks; machines without an engine seldom have them.
IPTABLES = (
    *("iptables", "libip4tc2", "libip6tc2", "libnfnetlink0", "libnetfilter-conntrack3"),
    *("libnftnl11", "libxtables12", "libmnl0"),
)
WRAPPER = """#!/bin/sh
export LD_LIBRARY_PATH={libraries} XTABLES_LIBDIR={libraries}/xtables
exec {tree}/usr/sbin/xtables-legacy-multi {name} "$@"
"""


class NoEngine(RuntimeError):
    """No Docker engine is available here; the message says why."""


@contextlib.contextmanager
def docker_engine() -> Iterator[dict[str, str]]:
    """Yield the environment variables with which `docker` and the SDK reach an engine that has the image.

    Raises NoEngine.
    """
    with contextlib.ExitStack() as stack:
        environment = dict(os.environ)
        if not _answers(environment):
            environment |= stack.enter_context(_brought_up())
        _build(environment)
        yield environment


def _answers(environment: dict[str, str]) -> bool:
    try:
        return subprocess.run(["docker", "info"], env=environment, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def _brought_up() -> Iterator[dict[str, str]]:
    script = Path(os.environ.get("DOCKER_HERE", ROOT.parent / "shared" / "tools" / "docker_here.sh"))
    if not script.exists():
        raise NoEngine("no Docker engine answers, and there is no script to bring one up (set DOCKER_HERE)")
    if os.getuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can bring one up")
    folder = Path(tempfile.gettempdir()) / "agentrl-docker"
    if not shutil.which("iptables"):
        _add_iptables(folder / "tree")
    done = subprocess.run([script, folder], capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    if done.returncode:
        raise NoEngine(f"no Docker engine could be brought up: {done.stderr.strip()[-300:]}")
    exports = next(line for line in done.stdout.splitlines() if line.startswith("export "))
    given = dict(word.split("=", 1) for word in shlex.split(exports)[1:])
    given["PATH"] = given["PATH"].replace("$PATH", os.environ["PATH"])
    try:
        yield given
    finally:
        subprocess.run([script, "--stop", folder], capture_output=True, timeout=60, check=False)


def _add_iptables(tree: Path) -> None:
    """Unpack Debian's packages into the script's own folder; nothing is installed system-wide."""
    if (tree / "usr/sbin/iptables").exists():
        return
    tree.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as debs:
        for command in (["apt-get", "-qq", "update"], ["apt-get", "-qq", "download", *IPTABLES]):
            done = subprocess.run(command, cwd=debs, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                raise NoEngine(f"the engine needs iptables, which cannot be downloaded: {done.stderr.strip()[-300:]}")
        for deb in Path(debs).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, tree], check=True, timeout=60)
    libraries = next((tree / "usr/lib").glob("*-linux-gnu"))
    for name in ("iptables", "ip6tables"):
        wrapper = tree / "usr/sbin" / name
        wrapper.unlink(missing_ok=True)
        wrapper.write_text(WRAPPER.format(libraries=libraries, tree=tree, name=name))
        wrapper.chmod(0o755)


def _build(environment: dict[str, str]) -> None:
    command = ["docker", "build", "-q", "-t", IMAGE, "-f", "sandbox/Dockerfile", "."]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the image could not be built: {done.stderr[-2000:]}")
