"""Each option of how an episode is counted changes its part of the outcome and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.rollouts.outcome import is_void, judged, soft_overlong_punishment
from agentrl.types import (
    Completion,
    FinishReason,
    Message,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
    user,
)

CALL = ToolCall(id="c", name="python", arguments={"code": "1"})
ANSWER = Message(role="assistant", content="So \\boxed{7}")
ASKS = Message(role="assistant", content="", tool_calls=(CALL,))
VOID = Message(role="assistant", content="Hm.")


def limits(**changes: Any) -> RolloutConfig:
    return RolloutConfig(max_context=100, max_turn_tokens=20, **changes)


def episode(
    *said: Message, num_tokens: int = 10, stop: StopReason = StopReason.COMPLETED, opening: int = 20
) -> Trajectory:
    """One turn a message; `num_tokens` in all behind the opening."""
    each = num_tokens // len(said)
    completion = Completion(
        token_ids=(1,) * each,
        behavior_logprobs=(-0.5,) * each,
        version_spans=(VersionSpan(version=0, start=0, end=each),),
        finish_reason=FinishReason.STOP,
    )
    turns = [Turn(observation_ids=(2,) * (opening if i == 0 else 0), completion=completion) for i in range(len(said))]
    answers = [m for message in said for m in (message, Message(role="tool", content="1"))]
    return Trajectory(
        id="e",
        task_id="t",
        turns=tuple(turns),
        messages=(user("q"), *answers),
        reward=1.0,
        rewards={"correct": 1.0},
        stop_reason=stop,
    )


def test_by_default_an_episode_is_left_as_it_is() -> None:
    for one in (episode(ASKS, ANSWER), episode(VOID), episode(VOID, stop=StopReason.MAX_CONTEXT)):
        assert judged([one], limits()) == (one,)


@pytest.mark.parametrize(
    ("said", "weight"),
    [((ASKS, ANSWER), 1.0), ((ASKS, VOID), 0.0), ((VOID, ANSWER), 0.0), ((ANSWER,), 1.0)],
)
def test_masking_void_turns_takes_the_episode_out_of_the_loss_and_leaves_its_reward(
    said: tuple[Message, ...], weight: float
) -> None:
    one = episode(*said)
    assert judged([one], limits(mask_void_turns=True)) == (replace(one, weight=weight),)


def test_a_call_that_did_not_parse_makes_a_void_turn() -> None:
    assert is_void(Message(role="assistant", content="<tool_call>{oops</tool_call>"))
    assert not is_void(ASKS) and not is_void(ANSWER)


def test_an_assistants_words_in_the_opening_are_not_turns_of_the_episode() -> None:
    one = episode(ANSWER)
    one = replace(one, messages=(user("q"), VOID, user("r"), *one.messages[1:]))
    assert judged([one], limits(mask_void_turns=True))[0].weight == 1.0


def test_notes_before_a_fork_are_not_void() -> None:
    segments = [episode(ASKS, VOID), episode(ANSWER)]
    summarized = judged(segments, limits(mask_void_turns=True, compaction="summarize"))
    assert [s.weight for s in summarized] == [0.5, 0.5]
    assert [s.weight for s in judged(segments, limits(mask_void_turns=True, compaction="drop"))] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("stop", "weight"),
    [
        (StopReason.MAX_CONTEXT, 0.0),
        (StopReason.MAX_TURN_TOKENS, 0.0),
        (StopReason.MAX_TURNS, 1.0),
        (StopReason.COMPLETED, 1.0),
    ],
)
def test_overlong_filtering_masks_what_the_limit_cut(stop: StopReason, weight: float) -> None:
    one = episode(ANSWER, stop=stop)
    assert judged([one], limits(overlong="mask")) == (replace(one, weight=weight),)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (12_288, 0.0), (14_336, 0.5), (16_384, 1.0), (20_000, 1.0)]
)
def test_the_punishment_is_dapos(num_tokens: int, expected: float) -> None:
    """L_max 16384 and L_cache 4096: 0 up to 12288, then a line down to -1."""
    assert soft_overlong_punishment(num_tokens, max_tokens=16_384, cache_tokens=4096) == expected


@pytest.mark.parametrize(
    ("num_tokens", "stop", "punishment"),
    [
        (40, StopReason.COMPLETED, 0.0),
        (70, StopReason.COMPLETED, 0.5),
        (30, StopReason.MAX_CONTEXT, 1.0),
        (30, StopReason.MAX_TURN_TOKENS, 1.0),
    ],
)
def test_penalizing_takes_the_punishment_off_the_reward_and_names_it(
    num_tokens: int, stop: StopReason, punishment: float
) -> None:
    """max_context 100 less an opening of 20 leaves L_max = 80; with L_cache = 20 the line begins at 60."""
    one = episode(ANSWER, num_tokens=num_tokens, stop=stop)
    (found,) = judged([one], limits(overlong="penalize", overlong_cache_tokens=20))
    assert found == replace(one, reward=1.0 - punishment, rewards={"correct": 1.0, "overlong": -punishment})


def test_segments_of_an_episode_share_its_weight_and_its_punishment() -> None:
    segments = [episode(ASKS, num_tokens=70), episode(ANSWER, num_tokens=40), episode(ANSWER)]
    found = judged(segments, limits(overlong="penalize", overlong_cache_tokens=20))
    assert [s.weight for s in found] == [pytest.approx(1 / 3)] * 3
    assert {s.reward for s in found} == {0.5}
