"""One engine of a pool, and its state. Independent of routing and of weight updates."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from agentrl.engine.base import SharedEngines, TrainableEngine, WeightUpdate

MAX_FALSE_UPDATES = 3
"""Failed weight updates, or proofs, in a row after which an engine is given up."""


class Replica(TrainableEngine, SharedEngines, AbstractAsyncContextManager["Replica"], Protocol):
    """An engine that can be in a pool. `generate` must not wait for a server that is gone: the pool has others.

    Example: `VLLMEngine(url)`, whose `return_timeout_s` is 0.
    """

    @property
    def url(self) -> str:
        """The server, for messages."""
        ...

    async def health(self) -> None:
        """Raises EngineError unless the engine runs."""
        ...

    async def recover(self) -> None:
        """After a restart before the first update: find out which weights it holds. Raises EngineError."""
        ...


@dataclass(kw_only=True, eq=False)
class PooledEngine:
    """An engine of the pool. Example: `PooledEngine(client=VLLMEngine(url))`."""

    client: Replica
    is_serving: bool = True
    is_back: bool = False
    """Out, and it answered when it was last asked: it can take weights."""
    is_gone: bool = False
    """Out, and it did not answer since: what was known of its weights says nothing of those that it returns with."""
    is_taking: bool = False
    """An update of it runs."""
    num_running: int = 0
    failures: int = 0
    """In a row."""
    false_updates: int = 0
    """In a row."""
    num_exits: int = 0
    """How often it left the pool."""
    version: int | None = None
    """The version it took in its last update, until it leaves the pool."""
    checksum: str = ""
    """Of the weights it took then."""
    update: WeightUpdate | None = None
    """The last one."""

    @property
    def is_lost(self) -> bool:
        """Whether it is given up."""
        return self.false_updates >= MAX_FALSE_UPDATES

    @property
    def takes_requests(self) -> bool:
        """Whether a new request may go there."""
        return self.is_serving and not self.client.wants_weights

    def has(self, version: int) -> bool:
        """Whether it is proven to hold `version`."""
        return self.is_serving and self.version == version and not self.client.wants_weights
