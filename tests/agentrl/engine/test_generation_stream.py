"""What is kept of an interrupted answer, and how its parts are joined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.generation_stream import GenerationStream, joined
from agentrl.engine.vllm_schema import Content, Delta, Entry, Span
from agentrl.types import Completion, FinishReason, Sampling

SAMPLING = Sampling(max_tokens=100)


def delta(*token_ids: int, finish_reason: str | None = None, spans: list[Span] | None = None) -> Delta:
    entries = [Entry(token_id=token, logprob=-float(token)) for token in token_ids]
    return Delta(
        token_ids=list(token_ids), logprobs=Content(content=entries), finish_reason=finish_reason, weight_versions=spans
    )


def test_all_that_arrived_is_kept_under_the_version_it_began_with() -> None:
    stream = GenerationStream(3)
    stream.extend(delta(1, 2))
    stream.extend(delta(3))
    kept = stream.certain_part(SAMPLING)
    assert kept.token_ids == (1, 2, 3)
    assert kept.behavior_logprobs == (-1.0, -2.0, -3.0)
    assert list(kept.policy_versions()) == [3, 3, 3]
    assert kept.finish_reason is FinishReason.ABORT


def test_what_arrived_after_an_update_began_is_of_no_certain_version_and_given_up() -> None:
    stream = GenerationStream(3)
    stream.extend(delta(1, 2))
    stream.weights_change()
    stream.extend(delta(3))
    stream.weights_change()
    assert stream.certain_part(SAMPLING).token_ids == (1, 2)


def test_tokens_that_may_begin_a_stop_text_are_given_up() -> None:
    stream = GenerationStream(0)
    stream.extend(delta(*range(1, 11)))
    assert stream.certain_part(Sampling(max_tokens=100, stop=("abc", "</x>"))).token_ids == tuple(range(1, 8))


def test_nothing_is_salvaged_of_nothing() -> None:
    kept = GenerationStream(0).certain_part(Sampling(max_tokens=100, stop=("abc",)))
    assert kept.token_ids == ()
    assert kept.version_spans == ()


@pytest.mark.parametrize("logprob", [0.1, -9999.0, float("nan")])
def test_a_logprob_that_is_none_is_refused_as_it_arrives(logprob: float) -> None:
    bad = Delta(token_ids=[1], logprobs=Content(content=[Entry(token_id=1, logprob=logprob)]))
    with pytest.raises(ValueError, match="logprob"):
        GenerationStream(0).extend(bad)


parts_of_versions = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5)


def part(versions: list[int]) -> Completion:
    stream = GenerationStream(0)
    spans = [Span(version=str(version), start=i, end=i + 1) for i, version in enumerate(versions)]
    stream.extend(delta(*range(len(versions)), finish_reason="length", spans=spans))
    return stream.completion()


@given(parts_of_versions)
def test_joined_parts_say_of_every_token_what_the_parts_said(versions: list[list[int]]) -> None:
    parts = [part(each) for each in versions]
    whole = joined(parts)
    assert list(whole.policy_versions()) == [version for each in versions for version in each]
    assert whole.token_ids == tuple(token for each in parts for token in each.token_ids)
    assert whole.behavior_logprobs == tuple(logprob for each in parts for logprob in each.behavior_logprobs)
