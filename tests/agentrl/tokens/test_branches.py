"""Whatever an agent does with its history: every sampled token is an action exactly once, in the context it had."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.tokens.branches import BranchPoint, SegmentStore
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Completion, FinishReason, Message, ToolCall, VersionSpan, system, user

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def said(tokenizer: TurnTokenizer, text: str, *, closed: bool = True) -> Completion:
    ids = [*tokenizer.encode_assistant(text), *([tokenizer.close_id] if closed else [])]
    return Completion(
        token_ids=tuple(ids),
        behavior_logprobs=(-0.5,) * len(ids),
        version_spans=(VersionSpan(version=0, start=0, end=len(ids)),),
        finish_reason=FinishReason.STOP if closed else FinishReason.LENGTH,
    )


@dataclass(kw_only=True)
class Recorder:
    """Plays calls one after the other, and remembers what was prompted and sampled."""

    tokenizer: TurnTokenizer
    store: SegmentStore
    asked: list[tuple[list[int], Completion]] = field(default_factory=list)

    def call(self, *history: Message, text: str = "yes", tools: tuple[dict[str, Any], ...] = ()) -> Message:
        return self.finish(self.store.branch_point(history, tools), text)

    def finish(self, point: BranchPoint, text: str, *, closed: bool = True) -> Message:
        completion = said(self.tokenizer, text, closed=closed)
        self.asked.append((point.prompt_ids, completion))
        answer = Message(role="assistant", content=text)
        self.store.commit(point, completion, said=answer, shown=answer)
        return answer

    def check(self) -> None:
        """Every call is one turn of one segment, with the very tokens that it was prompted with before it."""
        recorded = []
        for segment in self.store.segments:
            ids: list[int] = []
            for turn in segment.turns:
                ids += turn.observation_ids
                recorded.append((tuple(ids), turn.completion.token_ids))
                ids += turn.completion.token_ids
            assert ids == segment.token_ids
        assert sorted(recorded) == sorted((tuple(prompt), c.token_ids) for prompt, c in self.asked)


@pytest.fixture
def recorder(tokenizer: TurnTokenizer) -> Recorder:
    return Recorder(tokenizer=tokenizer, store=SegmentStore(tokenizer))


def test_a_history_that_grows_is_one_segment(recorder: Recorder) -> None:
    history = [system("s"), user("a")]
    for n in range(4):
        history += [recorder.call(*history, text=f"answer {n}"), user(f"question {n}")]
    recorder.check()
    (segment,) = recorder.store.segments
    assert len(segment.turns) == 4
    assert segment.messages == history[:-1]


def test_what_was_said_is_never_encoded_again(recorder: Recorder, tokenizer: TurnTokenizer) -> None:
    # Spelled letter by letter, as no tokenizer would: what is recorded is what was sampled.
    letters = [i for letter in "print" for i in tokenizer.encode_assistant(letter)]
    assert letters != tokenizer.encode_assistant("print")
    point = recorder.store.branch_point([user("a")], ())
    prompt = point.prompt_ids
    completion = Completion(
        token_ids=(*letters, tokenizer.close_id),
        behavior_logprobs=(-1.0,) * (len(letters) + 1),
        version_spans=(VersionSpan(version=0, start=0, end=len(letters) + 1),),
        finish_reason=FinishReason.STOP,
    )
    word = Message(role="assistant", content="print")
    recorder.store.commit(point, completion, said=word, shown=word)
    second = recorder.store.branch_point([user("a"), word, user("b")], ())
    assert second.prompt_ids[: len(prompt) + len(letters)] == prompt + letters


def test_a_turn_cut_short_is_closed_before_the_next(recorder: Recorder, tokenizer: TurnTokenizer) -> None:
    cut = recorder.finish(recorder.store.branch_point([user("a")], ()), "half a", closed=False)
    recorder.call(user("a"), cut, user("go on"))
    recorder.check()
    assert recorder.store.segments[0].turns[1].observation_ids[0] == tokenizer.close_id


@pytest.mark.parametrize(
    "rewritten",
    [
        (system("other"), user("a"), "answer", user("b")),
        ("answer", user("b")),
        (system("s"), user("a"), Message(role="assistant", content="not what was said"), user("b")),
        (system("s"), user("a"), "answer", Message(role="assistant", content="inserted"), user("b")),
    ],
    ids=["system prompt changed", "old messages dropped", "answer rewritten", "answer inserted"],
)
def test_a_history_that_was_rewritten_opens_a_segment(
    recorder: Recorder, tokenizer: TurnTokenizer, rewritten: tuple[Message | str, ...]
) -> None:
    answer = recorder.call(system("s"), user("a"), text="answer")
    history = [answer if isinstance(part, str) else part for part in rewritten]
    point = recorder.store.branch_point(history, ())
    assert point.prompt_ids == tokenizer.first_prompt(history)
    recorder.finish(point, "second")
    recorder.check()
    assert [len(segment.turns) for segment in recorder.store.segments] == [1, 1]


def test_other_tools_open_a_segment(recorder: Recorder) -> None:
    answer = recorder.call(user("a"))
    recorder.call(user("a"), answer, user("b"), tools=(TOOL,))
    recorder.check()
    assert len(recorder.store.segments) == 2


def test_a_branch_copies_the_tokens_it_branches_from(recorder: Recorder) -> None:
    first = recorder.call(user("a"), text="one")
    second = recorder.call(user("a"), first, user("b"), text="two")
    trunk = recorder.store.segments[0].token_ids[:]
    recorder.call(user("a"), first, user("b"), text="another two")
    recorder.call(user("a"), first, user("b"), second, user("c"), text="three")
    recorder.check()
    main, branch = recorder.store.segments
    assert [len(main.turns), len(branch.turns)] == [3, 1]
    assert list(branch.turns[0].observation_ids) == trunk[: len(branch.turns[0].observation_ids)]


def test_calls_under_way_at_once_get_places_of_their_own(recorder: Recorder) -> None:
    answer = recorder.call(user("a"))
    history = (user("a"), answer, user("b"))
    points = [recorder.store.branch_point(history, ()) for _ in range(3)]
    assert len({id(point.segment) for point in points}) == 3
    for n, point in enumerate(reversed(points)):
        recorder.finish(point, f"{n}")
    recorder.check()
    assert sorted(len(segment.turns) for segment in recorder.store.segments) == [1, 1, 2]


def test_a_call_that_came_to_nothing_leaves_its_place_free(recorder: Recorder) -> None:
    answer = recorder.call(user("a"))
    history = (user("a"), answer, user("b"))
    recorder.store.release(recorder.store.branch_point(history, ()))
    recorder.call(*history)
    recorder.check()
    assert [len(segment.turns) for segment in recorder.store.segments] == [2]


def test_of_two_equal_answers_the_calls_ids_tell_which_is_meant(recorder: Recorder, tokenizer: TurnTokenizer) -> None:
    points = [recorder.store.branch_point([user("a")], ()) for _ in range(2)]
    answers = []
    for n, point in enumerate(points):
        call = ToolCall(id=f"call_{n}", name="look", arguments={"at": [1, {"x": 2}]})
        answers.append(Message(role="assistant", content="", tool_calls=(call,)))
        recorder.store.commit(point, said(tokenizer, f"sampled {n}"), said=answers[n], shown=answers[n])
    for n, answer in enumerate(answers):
        point = recorder.store.branch_point([user("a"), answer, Message(role="tool", content="seen")], ())
        assert point.segment is recorder.store.segments[n]


def test_ids_of_calls_and_space_around_an_answer_do_not_matter(recorder: Recorder, tokenizer: TurnTokenizer) -> None:
    call = ToolCall(id="call_0", name="look", arguments={"a": 1, "b": 2})
    point = recorder.store.branch_point([user("a")], (TOOL,))
    answer = Message(role="assistant", content=" I see\n", tool_calls=(call,))
    recorder.store.commit(point, said(tokenizer, "x"), said=answer, shown=answer)
    again = ToolCall(id="renamed", name="look", arguments={"b": 2, "a": 1})
    history = [user("a"), Message(role="assistant", content="I see", tool_calls=(again,)), user("b")]
    assert recorder.store.branch_point(history, (TOOL,)).segment is recorder.store.segments[0]


CONTENTS = st.sampled_from(["a", "b", "", "<|im_end|>", "é ∑"])
NEW = st.lists(st.builds(Message, role=st.sampled_from(["user", "tool", "system"]), content=CONTENTS), max_size=2)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_agent_has_every_sampled_token_recorded_once(tokenizer: TurnTokenizer, data: st.DataObject) -> None:
    recorder = Recorder(tokenizer=tokenizer, store=SegmentStore(tokenizer))
    histories: list[list[Message]] = [[user("a")]]
    running: list[tuple[BranchPoint, list[Message]]] = []
    names = (f"{word} {n}" for n in itertools.count() for word in ("yes", "no <|im_end|>", ""))
    for _ in range(data.draw(st.integers(1, 12))):
        history = list(data.draw(st.sampled_from(histories)))
        trouble = data.draw(st.sampled_from(["grow", "grow", "drop", "rewrite"]))
        if trouble == "drop" and len(history) > 1:
            del history[data.draw(st.integers(0, len(history) - 2))]
        elif trouble == "rewrite":
            history[data.draw(st.integers(0, len(history) - 1))] = user("rewritten")
        history += data.draw(NEW)
        running.append((recorder.store.branch_point(history, data.draw(st.sampled_from([(), (TOOL,)]))), history))
        while running and data.draw(st.booleans()):
            point, asked = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if data.draw(st.integers(0, 4)) == 0:
                recorder.store.release(point)
            else:
                histories.append([*asked, recorder.finish(point, next(names), closed=data.draw(st.booleans()))])
    for point, _ in running:
        recorder.finish(point, next(names))
    recorder.check()
