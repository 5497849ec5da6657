"""The `rollout` section: how episodes are made, what of them counts, how stale they may get. Knows no other section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.config.algorithm import Section
from agentrl.data.curriculum import TaskChoice

MIN_TURN_TOKENS = 16


class RolloutConfig(Section):
    """How episodes are made, and how stale they may get."""

    groups_per_step: PositiveInt = 8
    group_size: Annotated[int, Field(ge=1)] = 8
    max_lag: Annotated[int, Field(ge=0)] = 2
    """Largest allowed learner version - oldest version of a trajectory. 0 is synchronous."""
    on_stale: Literal["drop", "requeue", "wait"] = "drop"
    """Too-old data: drop it, drop it and issue the task again, or let the learner wait for the oldest group."""
    task_choice: TaskChoice = "shuffled"
    """shuffled: every training row once an epoch. difficulty: rows whose solve rate is near one half most often, those
    that are never or always solved seldom, but again and again (agentrl/data/curriculum.py)."""
    max_context: PositiveInt = 2048
    """Tokens of a whole episode, prompt included."""
    max_turn_tokens: PositiveInt = 512
    tool_output_tokens: PositiveInt = 128
    """Longer tool output is cut, by a note that says so."""
    tool_output_chars: PositiveInt | None = None
    """Cut tool output to this many characters first, as SimpleTIR does (512)."""
    tool_output_keep: Literal["both", "head", "tail"] = "both"
    """Which end of long tool output is kept."""
    tool_format: Literal["auto", "hermes", "fences", "retool"] = "auto"
    """How calls are written: hermes `<tool_call>` JSON; code in ```python fences (SimpleTIR) or in `<code>` tags
    (ReTool). auto: hermes where there is a chat template, else fences."""
    mask_void_turns: bool = False
    """Leave episodes with a turn that has neither a whole call nor a boxed answer out of the loss (SimpleTIR)."""
    overlong: Literal["penalize", "mask", "keep"] = "keep"
    """Episodes that the context limit ends: take DAPO's soft overlong punishment off the reward, leave them out of the
    loss (DAPO's overlong filtering), or treat them as any other."""
    overlong_cache_tokens: PositiveInt = 512
    """DAPO's L_cache: the punishment grows from 0 to 1 over the last so many tokens before the limit."""
    compaction: Literal["none", "drop", "summarize"] = "none"
    """What is done before the context is full: nothing, leave old tool output out, or go on from the model's own notes.
    Each fork is a trainable segment of its own (docs/tokens.md)."""
    compact_at_tokens: PositiveInt | None = None
    """Tokens from which on it is done; None: when a full turn and its answer would not fit any more."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    episode_timeout_s: PositiveFloat = 300.0
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Times an episode is run again after an infrastructure failure before it counts as failed."""
    max_infra_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Stop the run when more than this share of the last 100 episodes failed for infrastructure."""
    canary_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checks that the sandbox and the grader still give known outcomes; 0 checks at the start only."""

    @property
    def min_turn_tokens(self) -> int:
        """A turn with less room than this is not begun."""
        return min(MIN_TURN_TOKENS, self.max_turn_tokens)

    @property
    def compaction_tokens(self) -> int:
        """A prompt with more than these is compacted."""
        return self.compact_at_tokens or self.max_context - self.max_turn_tokens - self.tool_output_tokens
