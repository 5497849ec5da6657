"""What the parts of a run ask for on a cluster, and how many nodes of one size have room for them. Starts nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.config import Config
from agentrl.config.ray import PartName
from agentrl.errors import ConfigError
from agentrl.supervision.place import Needs
from agentrl.training import launch

GPUS_PER_NODE = 8
"""Of a node, at most, where nobody says how many it has."""
KINDS = ("CPU", "GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One kind of part. Example: `Asked(part="engine", bundle={"CPU": 1.0, "GPU": 2.0}, count=4)`."""

    part: PartName
    bundle: dict[str, float]
    count: int
    is_spread: bool = False
    """Each is on a node of its own."""

    def __str__(self) -> str:
        bundle = ", ".join(f"{kind}: {number:g}" for kind, number in self.bundle.items())
        return f"{self.count} x {{{bundle}}}{', each on a node of its own' if self.is_spread else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """What each node has; None where it is to be computed. Example: `NodeSize(cpus=32, gpus=8)`."""

    cpus: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of one size. Example: `Nodes(count=3, cpus=16, gpus=8)`."""

    count: int
    cpus: int
    gpus: int


@dataclass(eq=False)
class _Node:
    free: dict[str, float]
    parts: list[Asked] = field(default_factory=list)

    def has_room(self, asked: Asked) -> bool:
        if asked.is_spread and asked in self.parts:
            return False
        return all(self.free[kind] >= asked.bundle.get(kind, 0) for kind in KINDS)

    def take(self, asked: Asked) -> None:
        self.parts.append(asked)
        for kind in KINDS:
            self.free[kind] -= asked.bundle.get(kind, 0)


def asked_of(config: Config) -> list[Asked]:
    """What the parts of `config`, with place=ray, ask for, as the run itself does: the largest first.

    Raises ConfigError for a resource that only some clusters have, MissingDependencyError without vLLM.
    """
    found: dict[PartName, Asked] = {}
    for needs in launch.needs_of(config):
        assert needs.part is not None
        count = found[needs.part].count if needs.part in found else 0
        found[needs.part] = _asked(config, needs.part, needs, count + needs.machines)
    return sorted(found.values(), key=_size, reverse=True)


def _size(one: Asked) -> tuple[bool, float, float]:
    return one.is_spread, one.bundle.get("GPU", 0), one.bundle.get("CPU", 0)


def _asked(config: Config, part: PartName, needs: Needs, count: int) -> Asked:
    bundle = config.ray.bundles.get(part, {kind: needs.bundle[kind] for kind in KINDS if kind in needs.bundle})
    if other := [kind for kind in bundle if kind not in KINDS]:
        raise ConfigError(
            f"ray.bundles.{part} asks for {other[0]}: the nodes of a rendered file have only CPU and GPU. Leave "
            f"{other[0]} out"
        )
    return Asked(part=part, bundle=bundle, count=count, is_spread=needs.machines > 1)


def nodes_for(asked: Sequence[Asked], size: NodeSize, *, count: int | None = None) -> Nodes:
    """The nodes that have room for all: as few as a first-fit packing finds, or `count`.

    Without `size.gpus` a node has the GPUs of all parts, at most 8; without `size.cpus`, the CPUs of what it holds and
    one for the orchestrator. Raises ConfigError where there is no room.

    >>> engine = Asked(part="engine", bundle={"CPU": 1, "GPU": 2}, count=5)
    >>> nodes_for([engine], NodeSize())
    Nodes(count=2, cpus=5, gpus=8)
    """
    largest, total = (combine(_numbers(asked, "GPU")) for combine in (max, sum))
    gpus = max(math.ceil(largest), min(GPUS_PER_NODE, math.ceil(total))) if size.gpus is None else size.gpus
    room = {"CPU": math.inf if size.cpus is None else float(size.cpus), "GPU": float(gpus)}
    packed: list[_Node] = []
    for one in asked:
        for _ in range(one.count):
            node = next((node for node in packed if node.has_room(one)), None)
            if node is None:
                packed.append(node := _Node(dict(room)))
                if not node.has_room(one):
                    raise ConfigError(f"a node has no room for one {one.part}.\n{_table(asked, size)}")
            node.take(one)
    if count is not None and count < len(packed):
        raise ConfigError(f"--nodes {count}: the parts need {len(packed)}.\n{_table(asked, size)}")
    used = max(sum(part.bundle.get("CPU", 0) for part in node.parts) for node in packed)
    cpus = math.ceil(used) + 1 if size.cpus is None else size.cpus
    return Nodes(count=count or len(packed), cpus=cpus, gpus=gpus)


def _numbers(asked: Sequence[Asked], kind: str) -> list[float]:
    return [one.bundle.get(kind, 0) for one in asked for _ in range(one.count)]


def _table(asked: Sequence[Asked], size: NodeSize) -> str:
    """What is asked for, and what a node has."""
    given = {"CPU": size.cpus, "GPU": size.gpus}
    node = ", ".join(f"{kind}: {number}" for kind, number in given.items() if number is not None)
    return "\n".join([described(asked), f"a node: {{{node}}} (--cpus-per-node, --gpus-per-node)"])


def described(asked: Sequence[Asked]) -> str:
    """A line for each kind of part.

    >>> print(described([Asked(part="engine", bundle={"CPU": 1, "GPU": 2}, count=5)]))
    engine: 5 x {CPU: 1, GPU: 2}
    """
    return "\n".join(f"{one.part.replace('_', ' ')}: {one}" for one in asked)
