"""Engine: what the rollout asks of whatever generates tokens, and the HTTP client of a stock vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.types import Completion, Sampling, WeightsRef


class Engine(Protocol):
    """Token ids in; token ids, logprobs and version spans out. Raises EngineError for anything else."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request in the engine."""
        ...

    async def update_weights(self, ref: WeightsRef) -> float:
        """Swap weights in flight; returns the seconds generation stood still. Raises WeightSyncError."""
        ...
