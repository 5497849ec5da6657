"""Machines of a cluster as namespaces of this one: each has its own address, processes, host name and /tmp/ray.

They see the files of this machine and nothing of its network: a pair of devices that nothing else uses joins them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
"""The first process of a machine: it takes the orphans."""
SPACES = ("--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
START = """
set -e
hostname "$1"
ip link set lo up
mkdir -p /tmp/ray
mount --bind "$2/ray" /tmp/ray
mount --bind "$2/hosts" /etc/hosts
exec "$3" -c "$4"
"""


def without_rays(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without Ray's settings: those that one file of tests sets for its process hold for all of it."""
    return {name: value for name, value in env.items() if not name.startswith("RAY_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One of them. Example: `machine.start(["ray", "start"], cwd=folder)`."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]
    pid: int
    """Of its first process, as this machine sees it."""
    network: int
    """Keeps its network open: with it the device of the other machine would go, and that one's address."""

    def start(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **options: Any) -> Any:
        """The command, as a process there."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p", "--"]
        return subprocess.Popen([*enter, "env", "-C", str(cwd), *command], env=dict(env), **options)

    def switch_off(self) -> None:
        """Cut its network, so that nobody is told, and end all of its processes at once."""
        if self.holder.poll() is None:
            _in_network(self, "ip", "link", "set", "eth0", "down")
        self.holder.kill()
        self.holder.wait()


def why_not() -> str | None:
    """Why this machine cannot make them; None where it can."""
    if os.geteuid():
        return "needs root"
    tried = subprocess.run(
        ["unshare", *SPACES, "ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """n1 at 10.77.0.1 and n2 at 10.77.0.2, until the end of the block."""
    names = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
    made: list[Machine] = []
    try:
        for name, address in names.items():
            made.append(_made(name, address, folder / name, names))
        first, second = made
        _in_network(
            first, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid)
        )
        for machine in made:
            _in_network(machine, "ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            _in_network(machine, "ip", "link", "set", "eth0", "up")
        yield first, second
    finally:
        for machine in made:
            machine.holder.kill()
            machine.holder.wait()
            os.close(machine.network)


def _made(name: str, address: str, folder: Path, names: Mapping[str, str]) -> Machine:
    (folder / "ray").mkdir(parents=True)
    hosts = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in names.items())]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    holder = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            *SPACES,
            "sh",
            "-c",
            START,
            "sh",
            name,
            str(folder),
            sys.executable,
            FIRST,
        ],
        stdin=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and holder.poll() is None:
        with suppress(OSError, ValueError):
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            pid = int(children[0]) if children else 0
            if pid and FIRST.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
                return Machine(name=name, address=address, holder=holder, pid=pid, network=network)
        time.sleep(0.05)
    holder.kill()
    raise RuntimeError(f"{name} did not start")


def _in_network(machine: Machine, *command: str) -> None:
    subprocess.run(["nsenter", "-t", str(machine.pid), "-n", "--", *command], check=True)
