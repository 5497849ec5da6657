"""What `python -m trainer.plan` answers about one config: the model's shape, and the learner's memory phase by phase.

JSON between two processes, because agentrl imports no torch. All sizes are bytes, of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a plan needs.

    Example: `shape.kv_bytes_per_token(2)` is 114,688 for Qwen3-1.7B in bfloat16.
    """

    num_parameters: int
    num_trained: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    def kv_bytes_per_token(self, itemsize: int, *, tensor_parallel: int = 1) -> int:
        """Keys and values of one token on one GPU; each GPU has at least one head."""
        heads = max(1, self.num_kv_heads // tensor_parallel)
        return 2 * self.num_layers * heads * self.head_size * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """One pass over a pack: what it allocates and computes. Example: `cost.matrix_flop / cost.num_tokens`."""

    num_tokens: int
    peak_bytes: int
    """Beyond weights and sums."""
    matrix_flop: float
    """Of matrix products and attention."""
    moved_bytes: float
    """Read and written by all other operations, each by itself: nothing is fused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of the learner on one GPU. Example: `Phase(name="load", parts={"weights": 10}).num_bytes`."""

    name: str
    parts: Mapping[str, int]
    """Bytes by what they hold, alive at the same time."""

    @property
    def num_bytes(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNeeds:
    """One rank under one gradient method. Example: `max(phase.num_bytes for phase in needs.phases)`."""

    method: str
    """A value of `learner.gradient`."""
    phases: tuple[Phase, ...]
    passes: tuple[PassCost, ...]
    """The passes that each pack goes through in a step, in their order."""

    @property
    def peak_bytes(self) -> int:
        """Of the largest phase."""
        return max(phase.num_bytes for phase in self.phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerNeeds:
    """What one rank needs. Example: `needs.methods[0].method` is what `learner.gradient: auto` prefers."""

    shape: ModelShape
    methods: tuple[GradientNeeds, ...]
    """The gradient methods that the config allows, the fastest first."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """What stays on the GPU between steps."""
