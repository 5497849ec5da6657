"""A Ray cluster: joining it, refusing one that is open to everybody, and what is free on its nodes.

Independent of what is started there (ray_place.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.config.ray import RayConfig
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.supervision.place import Needs
from agentrl.supervision.threads import in_thread

LOCAL_CPUS = 8.0  # of a cluster made for one run: Ray only counts them
LOCAL_STORE_BYTES = 80 * 2**20
PROBE_S = 60.0
PAUSE_S = 0.5
REFUSAL = "InvalidAuthToken"  # in what Ray says of a call without the cluster's token
ASKS_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=5)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster. Example: `Node(address="10.0.0.3", total={"CPU": 8.0}, available={"CPU": 2.0})`."""

    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]


@asynccontextmanager
async def joined(settings: RayConfig) -> AsyncIterator[Any]:
    """The module `ray`, connected to the cluster of `settings`; parts that still run end with the block.

    Raises MissingDependencyError without the package, ConfigError for a cluster that cannot be reached or requires no
    token.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("place=ray needs the package ray: pip install 'agentrl-vcpo[ray]'") from error
    async with _connected(ray, settings):
        address = ray.get_runtime_context().gcs_address
        if not settings.allow_without_token and await in_thread(partial(_is_open, address), name="probe of Ray"):
            raise ConfigError(
                f"the Ray cluster at {address} requires no token, so that everybody who reaches its ports can run code "
                "on it: start it with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes the token, which all "
                "nodes need), or set ray.allow_without_token=true in a network of your own"
            )
        yield ray


@asynccontextmanager
async def _connected(ray: Any, settings: RayConfig) -> AsyncIterator[None]:
    """Connected by a thread that lives as long as the block: Linux ends a cluster that is made here with the thread
    that made it. In the main thread Ray would replace our handler of SIGTERM. Raises ConfigError.
    """
    loop, connected, is_over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hold() -> None:
        try:
            _connect(ray, settings)
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(connected.set)
            is_over.wait()
        finally:
            ray.shutdown()

    holding = asyncio.create_task(in_thread(hold, name="connection to Ray"), name="connection to Ray")
    waiting = asyncio.create_task(connected.wait(), name="start of the connection to Ray")
    try:
        await asyncio.wait({holding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            await holding
        yield
    finally:
        is_over.set()
        waiting.cancel()
        if not connected.is_set():
            holding.cancel()
        await asyncio.wait({holding})


def _connect(ray: Any, settings: RayConfig) -> None:
    """Join the cluster, or make one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        try:
            ray.init(address=settings.address or "auto", **common)
        except ConnectionError:
            if settings.address is not None:
                raise
            cpus = max(LOCAL_CPUS, os.cpu_count() or 1)
            ray.init(num_cpus=cpus, object_store_memory=LOCAL_STORE_BYTES, include_dashboard=False, **common)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = settings.address or "this machine"
        raise ConfigError(f"ray.address: cannot join the Ray cluster of {where}: {error}") from error


def _is_open(address: str) -> bool:
    """Whether the cluster's head answers a process that gives no token. It is asked again for PROBE_S.

    Raises ConfigError where that stays unknown.
    """
    deadline = time.monotonic() + PROBE_S
    said = ""
    while (left_s := deadline - time.monotonic()) > 0:
        code, said = _asked_without_token(address, within_s=left_s)
        if code == 0:
            return True
        if REFUSAL in said:
            return False
        time.sleep(min(PAUSE_S, left_s))
    raise ConfigError(
        f"whether the Ray cluster at {address} requires a token could not be found out: {said[-500:]}. Try again, or "
        "set ray.allow_without_token=true in a network of your own"
    )


def _asked_without_token(address: str, *, within_s: float) -> tuple[int | None, str]:
    """(exit code, errors) of a process that asks the head without a token; None where it did not end in time."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASKS_WITHOUT_TOKEN, address],
            env={**without, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {PROBE_S:g} s"
    return asked.returncode, asked.stderr.strip()


def alive_nodes(ray: Any) -> list[Node]:
    """The nodes that are alive, and what is free on them."""
    available = ray._private.state.available_resources_per_node()
    return [
        Node(
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def shortage(needs: Needs, nodes: Sequence[Node]) -> str:
    """The table of what is asked for and what there is, with a row for each node.

    >>> print(shortage(Needs(bundle={"GPU": 2}), [Node(address="10.0.0.3", total={"GPU": 1}, available={})]))
    asked for: 1 x {GPU: 2}
    node      GPU free/all
    10.0.0.3           0/1
    """
    bundle = ", ".join(f"{kind}: {number:g}" for kind, number in needs.bundle.items())
    spread = ", each on a node of its own" if needs.machines > 1 else ""
    rows = [["node", *(f"{kind} free/all" for kind in needs.bundle)]]
    for node in nodes:
        free = (f"{node.available.get(kind, 0):g}/{node.total.get(kind, 0):g}" for kind in needs.bundle)
        rows.append([node.address, *free])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([f"asked for: {needs.machines} x {{{bundle}}}{spread}", *table])
