"""OpenAI's format, in both directions, checked with OpenAI's own client library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.chat.openai_schema import ApiError, ChatAnswer, answer_body, answer_events, message_body, read_request
from agentrl.types import Message, ToolCall

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"type": "function", "function": {"name": "look"}}
CALLS = (
    ToolCall(id="call_0", name="look", arguments={"at": "é\n", "n": 1}),
    ToolCall(id="c1", name="go", arguments={}),
)


def request(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO, **fields}).encode()


def test_messages_and_tools_are_read() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hello", "name": "Ann"},
        message_body(Message(role="assistant", content="", tool_calls=CALLS)),
        {"role": "tool", "content": "seen", "tool_call_id": "call_0"},
    ]
    asked = read_request(request(messages=messages, tools=[tool], max_tokens=7, stop="\n", stream=True, user="me"))
    assert [m.role for m in asked.messages] == ["system", "user", "assistant", "tool"]
    assert asked.messages[0].content == "be brief"
    assert asked.messages[2] == Message(role="assistant", content="", tool_calls=CALLS)
    assert (asked.tools, asked.max_tokens, asked.stop, asked.stream) == ((tool,), 7, ("\n",), True)


def test_what_the_run_rules_over_is_named() -> None:
    asked = read_request(request(temperature=0, top_p=0.9, seed=None, n=1, tool_choice="auto", logit_bias={}))
    assert asked.overruled == ("temperature", "top_p")
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        assert read_request(request(tools=[LOOK], tool_choice=choice)).overruled == ("tool_choice",)
    assert read_request(request(tool_choice="none")).overruled == ()


@pytest.mark.parametrize(
    ("fields", "param", "mend"),
    [
        ({"n": 2}, "n", "make n calls"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "own distribution"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"tools": [LOOK], "tool_choice": "none"}, "tool_choice", "leave `tools` out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "parse it"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "own distribution"),
        ({"logprobs": True}, "logprobs", "recorded"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"beam_width": 4}, "beam_width", "leave it out"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", "not one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "model of text"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_mend(fields: dict[str, Any], param: str, mend: str) -> None:
    with pytest.raises(ApiError, match=mend) as caught:
        read_request(request(**fields))
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": [{"role": "user", "content": 1}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        request(tools=[{"type": "function", "function": {}}]),
        request(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]),
        request(
            messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1e}'}}]}]
        ),
        request(
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}
            ]
        ),
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(body)
    assert caught.value.status == 400


NAMES = (
    *("messages", "role", "content", "tool_calls", "function", "name", "arguments", "id", "type", "text", "tools"),
    *("max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "include_usage", "n", "temperature"),
    *("tool_choice", "response_format", "parallel_tool_calls", "logit_bias", "unknown", "model", "top_logprobs"),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "user", "function", "{", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), is_request=st.booleans())
def test_any_json_is_read_or_refused(fields: dict[str, Any], is_request: bool) -> None:
    body = json.dumps({**fields, "messages": HELLO} if is_request else fields).encode()
    try:
        asked = read_request(body)
    except ApiError as error:
        assert error.status == 400
        json.dumps(error.body())
    else:
        assert asked.messages


@pytest.mark.parametrize(
    "message", [Message(role="assistant", content="hi\n"), Message(role="assistant", content="", tool_calls=CALLS)]
)
def test_an_answer_comes_back_as_it_went_out(message: Message) -> None:
    answer = ChatAnswer(message=message, finish="stop", num_prompt_tokens=5, num_completion_tokens=2)
    body = ChatCompletion.model_validate(answer_body(answer, model="policy"), strict=True)
    echoed = body.choices[0].message.model_dump()
    assert read_request(request(messages=[*HELLO, echoed])).messages[1] == message
    assert body.usage is not None and body.usage.total_tokens == 7


def test_events_add_up_to_the_answer() -> None:
    message = Message(role="assistant", content="I look", tool_calls=CALLS)
    answer = ChatAnswer(message=message, finish="tool_calls", num_prompt_tokens=5, num_completion_tokens=2)
    *events, done = b"".join(answer_events(answer, model="policy", include_usage=True)).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look"
    names = [call.function.name for delta in deltas for call in delta.tool_calls or () if call.function]
    assert names == ["look", "go"]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
