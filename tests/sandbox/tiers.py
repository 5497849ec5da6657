"""The isolation tiers of the sandbox: what each one provides, and how the tests start a service of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.sandbox.conftest import Service, start_service

PLAIN_UID = 65_534
SECRET = "secret-of-the-host-4711"

OPEN_FOLDERS = Path(__file__).with_name("open_folders.py")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A backend, and the user that it runs as."""

    name: str
    backend: str
    uid: int | None = None  # start it through open_folders.py
    is_isolated: bool = True
    has_own_folders: bool = True  # /tmp and /dev/shm are the session's alone, and sized by the kernel
    num_visible_pids: int | None = None  # what /proc shows between calls; None: it cannot be read, or shows the host's
    processes_are_ours: bool = True  # the sessions run below the service's own process
    take_every: int = 1  # every n-th case of an attack is run; one tier runs them all

    def start(self, *more: str, slots: int = 4, env: Mapping[str, str] | None = None) -> Service:
        """Start a service of this tier with small limits and the host's secret in its environment."""
        flags = ["--backend", self.backend, "--slots", str(slots), "--warm", str(slots), "--token-env", "TEST_TOKENS"]
        flags += ["--memory-bytes", str(256 * 1024**2), "--disk-bytes", str(32 * 1024**2), "--num-processes", "32"]
        flags += ["--allow-unsafe"] if not self.is_isolated else []
        # Each container imports them again, two for each attack, and sympy takes longest.
        flags += ["--preload", "numpy"] if self.backend == "docker" else []
        env = {"HOST_SECRET": SECRET, **(env or {})}
        if self.uid is None:
            return start_service(*flags, *more, env=env)
        return start_service(*flags, *more, env=env, program=[str(OPEN_FOLDERS), str(self.uid)])


TIERS = {
    tier.name: tier
    for tier in (
        Tier(name="namespaces", backend="namespaces", num_visible_pids=1),
        Tier(name="namespaces-plain", backend="namespaces", uid=PLAIN_UID, num_visible_pids=1, take_every=4),
        Tier(name="docker", backend="docker", num_visible_pids=2, processes_are_ours=False, take_every=12),
        Tier(name="landlock", backend="landlock", uid=0, has_own_folders=False, take_every=2),
        Tier(name="landlock-plain", backend="landlock", uid=PLAIN_UID, has_own_folders=False, take_every=4),
        Tier(name="unsafe", backend="unsafe", is_isolated=False, has_own_folders=False, take_every=3),
    )
}


def why_not(tier: Tier) -> str | None:
    """The reason why this tier cannot be started here, or None."""
    return "changing the user needs root" if tier.uid is not None and os.getuid() != 0 else None
