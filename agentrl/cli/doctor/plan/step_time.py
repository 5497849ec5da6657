"""The least time of a step by counted operations and bytes. Arithmetic from data sheets: nothing here was measured.

Independent of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.cli.doctor.plan.cards import Card
from agentrl.cli.doctor.plan.engine_memory import EngineNeeds, running
from agentrl.cli.doctor.plan.records import ModelShape, PassCost
from agentrl.config import Config

MATRIX_SHARE = 0.7
"""Share of the data sheet's products that large matrices reach."""
BANDWIDTH_SHARE = 0.8
"""Share of the data sheet's bandwidth that element-wise operations reach."""
CEILING = (
    f"at {MATRIX_SHARE:.0%} of the card's dense bfloat16 products and {BANDWIDTH_SHARE:.0%} of its memory bandwidth, "
    "each operation by itself; communication, launches, publishing, tools and prefill are not counted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Least seconds of one step. Example: `time.learner_s` is 40 where a rank computes for 40 s."""

    mean_tokens: int
    learner_s: float | None  # None where the card's speed is not known, or it computes in float32
    generation_s: float | None
    mfu: float | None  # of the learner: products of the forward and backward over the data sheet

    def describe(self) -> str:
        """One sentence, with its assumptions."""
        if self.learner_s is None:
            return "seconds a step: not computed for this card and number format"
        learner = f"learner {self.learner_s:.0f} s (at most {self.mfu:.0%} MFU)"
        both = f"{learner}, generation {self.generation_s:.0f} s"
        return f"a step takes at least: {both}, for episodes of {self.mean_tokens} tokens; {CEILING}"


def step_time(
    config: Config,
    shape: ModelShape,
    passes: Sequence[PassCost],
    engine: EngineNeeds,
    card: Card,
    *,
    mean_tokens: int,
) -> StepTime:
    """The least time of a step of `config` on GPUs of one kind.

    Learner: every pass of every token, its products and its traffic one after the other, over the ranks. Generation:
    each decoding step reads the weights and half of the mean context's KV entries of each running sequence.

    Example: `step_time(config, needs.shape, passes, engine, card, mean_tokens=4096).learner_s`.
    """
    nothing = StepTime(mean_tokens=mean_tokens, learner_s=None, generation_s=None, mfu=None)
    if card.flop_per_s is None or card.bytes_per_s is None or config.model.dtype != "bfloat16":
        return nothing
    rollout = config.rollout
    num_played = rollout.groups_per_step * rollout.num_plays * mean_tokens
    num_trained = float(rollout.groups_per_step * rollout.group_size * mean_tokens)
    if rollout.replay is not None:
        num_trained /= rollout.replay.recent
    flop, moved = MATRIX_SHARE * card.flop_per_s, BANDWIDTH_SHARE * card.bytes_per_s
    per_token = sum((one.matrix_flop / flop + one.moved_bytes / moved) / one.num_tokens for one in passes)
    learner_s = num_trained * per_token / config.learner.num_ranks
    used = 6 * shape.num_parameters / card.flop_per_s
    at_once = max(1, min(running(config), engine.mean_contexts))
    read = engine.weights_bytes + at_once * engine.kv_bytes_per_token * mean_tokens / 2
    products = 2 * shape.num_parameters * at_once / config.engine.tensor_parallel
    token_s = max(read / moved, products / flop) / at_once
    generation_s = num_played * token_s / config.engine.num_engines
    return StepTime(mean_tokens=mean_tokens, learner_s=learner_s, generation_s=generation_s, mfu=used / per_token)
