"""What a way of publishing weights must offer, and what it needs from the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.config.engine import Transfer
from agentrl.engine.base import Receivers
from agentrl.errors import ConfigError
from agentrl.types import Probe, TransferInit, WeightsRef

FOLDER, STREAMED = ("safetensors", "reload"), ("gloo", "nccl", "ipc")


class Link(Protocol):
    """What a publisher needs from the orchestrator. All methods raise LearnerError."""

    def receivers(self, policy_version: int) -> Receivers:
        """The engines that will take this version from a group; none if all have it."""
        ...

    def open_transfer(self, init: TransferInit) -> None:
        """Return once they have all joined. Raises WeightsWanted too."""
        ...

    def publish(self, ref: WeightsRef) -> None:
        """Return once every engine has the weights and has proven it. Raises WeightsWanted too."""
        ...


class Publisher(Protocol):
    """One way of publishing weights. Every rank calls every method.

    Example::

        num_bytes = sender.publish(policy_version=4, probe=probe)
    """

    def publish(self, *, policy_version: int, probe: Probe) -> int:
        """Return the bytes sent, once the weights may change again.

        Raises LearnerError; WeightsWanted if an engine was restarted meanwhile: call `reopen` and publish again.
        """
        ...

    def proven(self) -> float:
        """Return once every engine has proven the last publication; how long after `publish` that was, in seconds.

        Raises LearnerError. Call it before the next publication.
        """
        ...

    def reopen(self) -> None:
        """Connect again before the next publication, since an engine was restarted."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """How and where to publish: `TransferSettings(backend="nccl", rank=0, weights_dir=path, timeout_s=300.0)`."""

    backend: Transfer
    rank: int
    weights_dir: Path  # for the folder backends
    timeout_s: float  # of one whole publication, restarts of an engine included

    def __post_init__(self) -> None:
        if self.backend not in (*FOLDER, *STREAMED):
            raise ConfigError(f"--weight-transfer {self.backend}: must be one of {', '.join((*FOLDER, *STREAMED))}")
