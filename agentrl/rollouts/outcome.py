"""The weight of a finished episode in the loss, and the penalty for overlength. Pure: records in, records out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.config import RolloutConfig
from agentrl.types import Message, StopReason, Trajectory

OVERLONG = "overlong"
"""Name of the penalty among the rewards."""
CUT = (StopReason.MAX_CONTEXT, StopReason.MAX_TURN_TOKENS)
"""Episodes that a limit on tokens ended."""
BOX = "\\boxed{"


def judged(segments: Sequence[Trajectory], config: RolloutConfig) -> tuple[Trajectory, ...]:
    """The segments of one episode with their weights, and with the reward after the overlength penalty.

    Each of S segments has weight 1/S: an episode counts once, however often it forked. Weight 0 leaves it out of the
    loss; its reward stays in its group's baseline, as in the papers of these rules.
    """
    weight = 0.0 if _is_masked(segments, config) else 1 / len(segments)
    punishment = 0.0
    if config.overlong == "penalize":
        punishment = max((_punishment(segment, config) for segment in segments if segment.turns), default=0.0)
    return tuple(_weighed(segment, weight, punishment, is_named=config.overlong == "penalize") for segment in segments)


def soft_overlong_punishment(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), as a positive number to subtract from the reward.

        0 for |y| <= L_max - L_cache;  (|y| - (L_max - L_cache)) / L_cache up to L_max;  1 beyond

    Args:
        num_tokens: |y|, tokens of the response.
        max_tokens: L_max.
        cache_tokens: L_cache.

    >>> soft_overlong_punishment(90, max_tokens=100, cache_tokens=20)
    0.5
    """
    return min(1.0, max(0.0, (num_tokens - (max_tokens - cache_tokens)) / cache_tokens))


def is_void(message: Message) -> bool:
    """Whether a turn has neither a complete call nor a boxed answer (SimpleTIR, arXiv 2509.02479, section 3)."""
    return not message.tool_calls and BOX not in message.content


def _is_masked(segments: Sequence[Trajectory], config: RolloutConfig) -> bool:
    if config.overlong == "mask" and segments[0].stop_reason in CUT:
        return True
    return config.mask_void_turns and any(is_void(message) for message in _said(segments, config))


def _said(segments: Sequence[Trajectory], config: RolloutConfig) -> list[Message]:
    """The model's turns in the episode, without the notes that end a summarized segment."""
    out: list[Message] = []
    for segment in segments:
        num_turns = len(segment.turns)
        said = (
            [message for message in segment.messages if message.role == "assistant"][-num_turns:] if num_turns else []
        )
        ends_with_notes = config.compaction == "summarize" and segment is not segments[-1]
        out += said[:-1] if ends_with_notes else said
    return out


def _punishment(segment: Trajectory, config: RolloutConfig) -> float:
    """The penalty of one segment; the full one if a generation was cut at the limit."""
    if segment.stop_reason in CUT:
        return 1.0
    num_opening = len(segment.turns[0].observation_ids)
    num_tokens = sum(len(turn.observation_ids) + len(turn.completion.token_ids) for turn in segment.turns)
    return soft_overlong_punishment(
        num_tokens - num_opening,
        max_tokens=config.max_context - num_opening,
        cache_tokens=config.overlong_cache_tokens,
    )


def _weighed(trajectory: Trajectory, weight: float, punishment: float, *, is_named: bool) -> Trajectory:
    if weight == trajectory.weight and not is_named:
        return trajectory
    rewards = {**trajectory.rewards, OVERLONG: -punishment} if is_named else trajectory.rewards
    return replace(trajectory, weight=weight, reward=trajectory.reward - punishment, rewards=rewards)
