import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tokens.tool_calls import format_hermes, parse_hermes
from agentrl.types import ToolCall

integers = st.integers(-(2**63), 2**64 - 1)  # what a record can hold; beyond, a call is reported as malformed
any_json = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
some_text = st.text(max_size=60).filter(lambda t: "<tool_call>" not in t and "<think>" not in t)
contents = some_text.filter(lambda t: not t.endswith("\n"))
calls = st.lists(st.tuples(st.text(), st.dictionaries(st.text(), any_json, max_size=3)), max_size=3)


@given(content=contents, calls=calls)
def test_parsing_inverts_formatting(content: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    tool_calls = tuple(
        ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(calls)
    )
    parsed = parse_hermes(format_hermes(content, tool_calls))
    assert parsed.tool_calls == tool_calls
    assert parsed.content == content
    assert parsed.errors == ()


@given(st.text(st.sampled_from('<tool_call>/{}":,name arguments\\n\n'), max_size=80))
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    parsed = parse_hermes(text)
    assert len(parsed.tool_calls) + len(parsed.errors) == 0 or "<tool_call>" in text


def test_code_that_contains_the_markers_is_one_call() -> None:
    code = 'print("</tool_call><tool_call>{}")'
    text = f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"
    assert [call.arguments for call in parse_hermes(text).tool_calls] == [{"code": code}]


def test_raw_newlines_in_the_code_are_taken_as_written() -> None:
    text = '<tool_call>{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}</tool_call>'
    assert parse_hermes(text).tool_calls[0].arguments == {"code": "a = 1\nprint(a)"}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ('{"name": "python", "arguments": {"code": "1"}', "not valid JSON"),
        ("python(1)</tool_call>", "not valid JSON"),
        ('{"name": "python", "arguments": {}}', "not closed"),
        ('["python"]</tool_call>', "is an object"),
        ('{"arguments": {}}</tool_call>', "is an object"),
        ('{"name": "python", "arguments": "1"}</tool_call>', "must be an object"),
        ("[" * 100_000 + "</tool_call>", "nested too deeply"),
        (r'{"name": "python", "arguments": {"code": "\ud800"}}</tool_call>', "cannot be recorded"),
        ('{"name": "python", "arguments": {"code": 18446744073709551616}}</tool_call>', "cannot be recorded"),
    ],
)
def test_a_malformed_call_is_reported_and_stays_readable(block: str, reason: str) -> None:
    parsed = parse_hermes(f"Look:\n<tool_call>{block}")
    assert parsed.tool_calls == ()
    assert reason in parsed.errors[0]
    assert parsed.content == f"Look:\n<tool_call>{block}"


def test_a_good_call_after_a_bad_one_is_found() -> None:
    parsed = parse_hermes('<tool_call>{oops}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert [call.name for call in parsed.tool_calls] == ["f"] and len(parsed.errors) == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_in_thoughts_are_not_calls(thinking: bool) -> None:
    call = '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
    text = ("" if thinking else "<think>") + call.replace("NAME", "no") + "</think>\n" + call.replace("NAME", "yes")
    assert [c.name for c in parse_hermes(text, thinking=thinking).tool_calls] == ["yes"]


def test_an_unfinished_thought_calls_nothing() -> None:
    assert parse_hermes('<think><tool_call>{"name": "f", "arguments": {}}</tool_call>').tool_calls == ()
