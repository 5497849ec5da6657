"""What passes between a driver and an environment: actions, step results, finished episodes. Knows neither of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agentrl.types import FinishReason, Message, StopReason, Task

Split = Literal["train", "test"]
STEP_REWARD = "step"
"""Name under which the sum of the rewards that `step` returned is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model did in one turn: its message with parsed calls, and what did not parse."""

    message: Message
    parse_errors: tuple[str, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP


class StepResult(NamedTuple):
    """Gymnasium's 5-tuple. `observation` holds the new messages only."""

    observation: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished conversation, as `score` sees it. `rewards` is filled in after scoring."""

    task: Task
    messages: tuple[Message, ...]
    stop_reason: StopReason
    step_reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def final_text(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")
