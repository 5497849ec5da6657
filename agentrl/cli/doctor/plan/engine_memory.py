"""The engine's half of a plan: weights, KV cache, and how many sequences fit at once. Arithmetic, no measurement.

The division of a GPU between engine and learner is that of agentrl/engine/memory.py. Independent of the learner.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.buffer.staleness import StalenessRule
from agentrl.cli.doctor.plan.cards import Card
from agentrl.cli.doctor.plan.records import ModelShape
from agentrl.config import Config
from agentrl.engine import memory

GRAPH_BYTES = 3 * 2**29
"""CUDA graphs and what the driver keeps outside of the engine's share: an estimate, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What one engine takes of each of its GPUs. Example: `needs.full_contexts >= 1`, or it does not start."""

    share_bytes: int
    """What vLLM may take: weights, KV cache and its work."""
    outside_bytes: int
    """CUDA graphs and context, beside the share."""
    asleep_bytes: int
    """What it keeps while the learner steps; the whole where it does not sleep."""
    weights_bytes: int
    kv_bytes: int
    """The KV cache; negative where not even the weights fit."""
    kv_bytes_per_token: int
    full_contexts: int
    """Sequences of `rollout.max_context` tokens that fit at once."""
    mean_contexts: int
    """Sequences of the assumed mean length."""

    @property
    def num_bytes(self) -> int:
        """Everything on one GPU."""
        return self.share_bytes + self.outside_bytes


def engine_needs(config: Config, shape: ModelShape, card: Card, *, is_shared: bool, mean_tokens: int) -> EngineNeeds:
    """What one engine of `config` takes of a card. `mean_tokens`: assumed length of an episode."""
    engine, itemsize = config.engine, 4 if config.model.dtype == "float32" else 2
    share = round(memory.engine_fraction(engine, is_shared=is_shared) * card.total_bytes)
    weights = shape.num_parameters * itemsize // engine.tensor_parallel
    left = round(share * (1 - memory.ENGINE_WORK)) - memory.ENGINE_BASE_BYTES - weights
    kv_bytes = left if engine.kv_cache_bytes is None else engine.kv_cache_bytes
    per_token = shape.kv_bytes_per_token(itemsize, tensor_parallel=engine.tensor_parallel)
    num_tokens = max(0, kv_bytes) // per_token
    sleeps = is_shared and engine.sleep_while_training
    return EngineNeeds(
        share_bytes=share if engine.kv_cache_bytes is None else share - left + kv_bytes,
        outside_bytes=GRAPH_BYTES,
        asleep_bytes=memory.ASLEEP_BYTES if sleeps else share + GRAPH_BYTES,
        weights_bytes=weights,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
        full_contexts=num_tokens // config.rollout.max_context,
        mean_contexts=num_tokens // mean_tokens,
    )


def running(config: Config) -> int:
    """Sequences that one engine would run at once: its limit, or its part of all episodes under way."""
    rollout = config.rollout
    episodes = StalenessRule.of(rollout).num_slots() * rollout.num_plays
    return min(config.engine.max_num_seqs, -(-episodes // config.engine.num_engines))
