"""The `rollout` section: how episodes are made, which of them count, how stale they may get.

Does not depend on any other section.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.section import Choices, Section
from agentrl.types import StopReason

MIN_TURN_TOKENS = 16

OnStale = Annotated[
    Literal["drop", "requeue", "wait", "finish"],
    Choices(
        {
            "drop": "drop the group",
            "requeue": "drop the group and issue its task again",
            "wait": "keep the learner waiting for the oldest group, so that nothing becomes too old",
            "finish": "train it all the same: max_lag then bounds how many groups are played, not their age",
        }
    ),
]
Partial = Annotated[
    Literal["keep", "mask", "restart"],
    Choices(
        {
            "keep": "train their older tokens, with the ratio that they have",
            "mask": "leave their older tokens out: they are read and neither weighed nor trained",
            "restart": "end them; their tasks are played again, groups_per_step of them in one step (tail batching)",
        }
    ),
]
TaskChoice = Annotated[
    Literal["shuffled", "difficulty"],
    Choices(
        {
            "shuffled": "every training row once an epoch",
            "difficulty": "rows whose solve rate is near one half most often, those that are never or always solved "
            "seldom but repeatedly",
        }
    ),
]
ToolOutputKeep = Annotated[
    Literal["both", "head", "tail"],
    Choices({"both": "its beginning and its end", "head": "its beginning", "tail": "its end"}),
]
ToolFormatName = Annotated[
    Literal["auto", "hermes", "fences", "retool"],
    Choices(
        {
            "auto": "hermes where the model has a chat template, else fences",
            "hermes": "`<tool_call>` JSON, answered in tool messages of the chat template",
            "fences": "a ```python block, answered as raw text in the same assistant turn (SimpleTIR)",
            "retool": "`<code>` tags, answered as raw text in the same assistant turn (ReTool)",
        }
    ),
]
Overlong = Annotated[
    Literal["penalize", "mask", "keep"],
    Choices(
        {
            "penalize": "subtract DAPO's soft overlong punishment from the reward",
            "mask": "leave them out of the loss (DAPO's overlong filtering)",
            "keep": "treat them like any other episode",
        }
    ),
]
Compaction = Annotated[
    Literal["none", "drop", "summarize"],
    Choices(
        {
            "none": "nothing: the episode ends when the context is full",
            "drop": "leave old tool output out of the prompt",
            "summarize": "let the model write notes, and continue from those",
        }
    ),
]


class ReplayConfig(Section):
    """Groups that were trained before are trained again beside the new ones, as in TBA (arXiv 2503.18929).

    Example:
        >>> ReplayConfig(recent=0.8).capacity
        256
    """

    recent: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Share of the trained groups that are new. The others come in addition to `rollout.groups_per_step`, and may have
    any lag."""
    capacity: PositiveInt = 256
    """Earlier groups are drawn from this many, the newest. They stay in memory and in the journal."""
    multiplier: Annotated[float, Field(ge=1)] = 1.0
    """Each task is played this many times `rollout.group_size`, rounded up; a batch has `group_size` of these episodes,
    drawn anew each time that the group is trained (TBA: 1.2)."""


class RolloutConfig(Section):
    """How episodes are made, and how stale they may get.

    Example:
        >>> RolloutConfig(max_context=4096, max_turn_tokens=512).compaction_tokens
        3456
    """

    groups_per_step: PositiveInt = 8
    """Groups in one batch of the learner."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Episodes of one task, which share a baseline."""
    max_lag: Annotated[float, Field(ge=0)] = 2
    """Largest allowed learner version - oldest version of a trajectory. 0 is synchronous. 1.5 allows 2 in half of a
    batch (docs/staleness.md)."""
    on_stale: OnStale = "drop"
    """What happens to data that is too old."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """At max_lag 0: groups played at once, as a multiple of `groups_per_step`. A step begins once `groups_per_step` are
    finished; `partial` says what happens to the others (docs/staleness.md)."""
    partial: Partial = "keep"
    """What happens to groups that are unfinished when a step begins. With keep and mask they pause and go on after it
    (APRIL), which needs on_stale=finish."""
    replay: ReplayConfig | None = None
    """Train groups more than once (docs/staleness.md). null: each group once."""
    task_choice: TaskChoice = "shuffled"
    """Which training row is played next (docs/staleness.md)."""
    max_context: PositiveInt = 2048
    """Tokens of a whole episode, prompt included."""
    max_turn_tokens: PositiveInt = 512
    """Tokens that the model may write in one turn."""
    tool_output_tokens: PositiveInt = 128
    """Longer tool output is cut, and a note in it says so."""
    tool_output_chars: PositiveInt | None = None
    """Cut tool output to this many characters first, as SimpleTIR does (512)."""
    tool_output_keep: ToolOutputKeep = "both"
    """Which part of long tool output is kept."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls and reads their output (docs/tokens.md)."""
    mask_void_turns: bool = False
    """Leave episodes with a turn that has neither a whole call nor a boxed answer out of the loss (SimpleTIR)."""
    overlong: Overlong = "keep"
    """What happens to episodes that a limit on tokens ends: of the context, or of a turn."""
    overlong_cache_tokens: PositiveInt = 512
    """DAPO's L_cache: the punishment grows from 0 to 1 over this many tokens before the limit."""
    compaction: Compaction = "none"
    """What is done before the context is full. Each fork is a trainable segment of its own (docs/tokens.md)."""
    compact_at_tokens: PositiveInt | None = None
    """Compact a prompt with more tokens than this. null: when a full turn and its answer would not fit any more."""
    temperature: PositiveFloat = 1.0
    """Must be 1 in training: any other distribution biases the importance ratios."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training, for the same reason."""
    episode_timeout_s: PositiveFloat = 300.0
    """Deadline of reset, of all turns together, and of the score. Turns finished by then are scored and trained."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Times an episode is run again after an infrastructure failure before it counts as failed."""
    max_infra_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Stop the run when more than this share of the last 100 groups, and more than 5, failed for
    infrastructure reasons."""
    canary_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checks that the sandbox and the grader still give known outcomes. 0: only at the start."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that play the episodes (docs/workers.md), on this machine or, with `place: ray`, where a CPU is free.
    0: the orchestrator plays them itself, unless `worker_listen` is set."""
    worker_listen: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")] | None = None
    """HOST:PORT at which workers of other machines join: `agentrl rollout-worker`. null: none can."""
    worker_episodes: PositiveInt = 2000
    """Episodes that one worker plays at once. Groups that exceed it wait; a worker always has at least one."""
    worker_timeout_s: Annotated[float, Field(ge=2)] = 60.0
    """A worker that is silent for this long is given up, and its groups are played by others. Code that blocks a
    worker's event loop is named and interrupted after half of it."""

    @model_validator(mode="after")
    def _lag_has_an_effect(self) -> RolloutConfig:
        fraction = self.max_lag % 1
        if fraction and math.floor(round(fraction * self.groups_per_step, 6)) == 0:
            raise ValueError(
                f"max_lag={self.max_lag:g} with groups_per_step={self.groups_per_step}: its fraction is less than one "
                f"group of a batch, so it changes nothing. Set max_lag={math.floor(self.max_lag)}, or at least "
                f"{math.floor(self.max_lag) + 1 / self.groups_per_step:.3g}"
            )
        return self

    @model_validator(mode="after")
    def _oversamples_without_lag(self) -> RolloutConfig:
        given = f"oversample={self.oversample:g}"
        if self.oversample > 1 and self.max_lag:
            raise ValueError(
                f"{given} with max_lag={self.max_lag:g}: groups already run ahead of the learner. Set max_lag=0, or "
                "oversample=1 and a larger max_lag"
            )
        if self.oversample > 1 and self.partial != "restart" and self.on_stale != "finish":
            raise ValueError(
                f"{given} with on_stale={self.on_stale}: every group that goes on in the next step would be too old "
                "when it ends. Set on_stale=finish, or partial=restart"
            )
        if self.partial == "restart" and self.on_stale == "finish":
            raise ValueError("on_stale=finish does nothing with partial=restart: no group is too old. Leave it out")
        if self.partial != "keep" and self.oversample == 1:
            raise ValueError(f"partial={self.partial} has an effect only with oversample above 1; leave it out")
        if self.partial == "mask" and self.replay is not None:
            raise ValueError("partial=mask leaves out every token of a group that replay repeats. Set partial=keep")
        return self

    @property
    def has_workers(self) -> bool:
        """Whether workers play the episodes, and not the orchestrator.

        >>> RolloutConfig(workers=2).has_workers
        True
        """
        return self.workers > 0 or self.worker_listen is not None

    @model_validator(mode="after")
    def _remembers_what_is_due(self) -> RolloutConfig:
        if self.replay is None:
            return self
        num_due = math.ceil(round(self.groups_per_step * (1 / self.replay.recent - 1), 6))
        if num_due > self.replay.capacity:
            raise ValueError(
                f"replay.recent={self.replay.recent:g} with groups_per_step={self.groups_per_step} adds up to "
                f"{num_due} earlier groups to a batch, and replay.capacity={self.replay.capacity} are remembered. Set "
                f"replay.capacity={num_due} or more, or a larger replay.recent"
            )
        return self

    @property
    def lag_bound(self) -> int:
        """The largest lag, in whole policy versions.

        >>> RolloutConfig(max_lag=0.5).lag_bound
        1
        """
        return math.ceil(self.max_lag)

    @property
    def num_plays(self) -> int:
        """Episodes played of each training task.

        >>> RolloutConfig(group_size=20, replay=ReplayConfig(multiplier=1.2)).num_plays
        24
        """
        return math.ceil(round(self.group_size * (self.replay.multiplier if self.replay else 1), 6))

    @property
    def min_turn_tokens(self) -> int:
        """No turn begins with less room than this."""
        return min(MIN_TURN_TOKENS, self.max_turn_tokens)

    @property
    def compaction_tokens(self) -> int:
        """A prompt with more tokens than this is compacted."""
        return self.compact_at_tokens or self.max_context - self.max_turn_tokens - self.tool_output_tokens

    def limit_of(self, num_tokens: int) -> StopReason:
        """Which limit cut a turn after `num_tokens` tokens: its own budget, or the context, which left it less.

        >>> RolloutConfig(max_turn_tokens=512).limit_of(100).value
        'max_context'
        """
        return StopReason.MAX_CONTEXT if num_tokens < self.max_turn_tokens else StopReason.MAX_TURN_TOKENS
