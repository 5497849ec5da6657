"""OpenAI's chat completions as records: a request in; an answer, its events, or an error out.

Each field of a request is obeyed, or reported as overruled, or refused with a hint how to fix the request. An unknown
field is refused too, since ignoring it could change what was meant. Independent of tokens, sessions and HTTP servers.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from agentrl.types import Message, Role, ToolCall

Finish = Literal["stop", "length", "tool_calls"]

OBEYED = ("messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options")
HARMLESS = frozenset(
    (
        *(*OBEYED, "parallel_tool_calls"),
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "verbosity"),
    )
)
"""Fields that are obeyed, and labels and hints that change no token."""
OVERRULED = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Fields that the run's own sampling settings override: tokens come from the model's own distribution."""
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "make n calls with the same messages; each is recorded as a branch"),
    "tool_choice": (("auto",), "leave `tools` out where the model must not call any"),
    "functions": (([],), "use `tools`"),
    "function_call": ((), "use `tools`"),
    "response_format": (({"type": "text"},), "say in a message what form the answer must have, and parse it"),
    "logit_bias": (({},), "leave it out: tokens must come from the model's own distribution"),
    "presence_penalty": ((0,), "leave it out: tokens must come from the model's own distribution"),
    "frequency_penalty": ((0,), "leave it out: tokens must come from the model's own distribution"),
    "repetition_penalty": ((1,), "leave it out: tokens must come from the model's own distribution"),
    "logprobs": ((False,), "leave it out: logprobs are recorded, but not handed to the agent"),
    "top_logprobs": ((0,), "leave it out: logprobs are recorded, but not handed to the agent"),
    "modalities": ((["text"],), "this is a model of text"),
    "audio": ((), "this is a model of text"),
    "prediction": ((), "leave it out"),
    "web_search_options": ((), "offer a search tool of your own in `tools`"),
}
"""Fields that cannot be obeyed: the values that change nothing, and how to fix a request with another value."""
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ApiError(Exception):
    """An error in OpenAI's format. Client libraries raise an exception in the agent by its status.

    raise ApiError(400, "there must be at least one message", param="messages")
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One checked call.

    ChatRequest(messages=(user("What is 2 + 2?"),), max_tokens=100)
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    single_call: bool = False  # parallel_tool_calls=false: only the first call of a turn is returned
    stream: bool = False
    include_usage: bool = False
    overruled: tuple[str, ...] = ()  # fields that the run's own settings override


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The model's answer, as the agent receives it.

    ChatAnswer(message=message, finish="stop", num_prompt_tokens=12, num_completion_tokens=3)
    """

    message: Message
    thought: str = ""  # the text inside <think>; agents need not send it back
    finish: Finish
    num_prompt_tokens: int
    num_completion_tokens: int


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    tools: list[_Tool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    parallel_tool_calls: bool | None = None


def read_request(body: bytes) -> ChatRequest:
    """A checked request. Raises ApiError, status 400, naming the field and how to fix it."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.json.decode(body, type=_Request)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"this is not a chat completion request: {error}") from error
    _refuse_unsupported(fields)
    if not request.messages:
        raise ApiError(400, "there must be at least one message", param="messages")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if limit is not None and limit < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {limit}", param="max_tokens")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return ChatRequest(
        messages=tuple(_to_message(message, i) for i, message in enumerate(request.messages)),
        tools=tuple(fields.get("tools") or ()),
        max_tokens=limit,
        stop=tuple(text for text in stop if text),
        single_call=request.parallel_tool_calls is False,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        overruled=tuple(name for name in (*OVERRULED, *_forced(fields)) if fields.get(name) is not None),
    )


def _forced(fields: dict[str, Any]) -> tuple[str, ...]:
    """`tool_choice` if it would force a call: only constrained sampling could do that, so the model decides."""
    choice = fields.get("tool_choice")
    return ("tool_choice",) if choice == "required" or isinstance(choice, dict) else ()


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None or name in HARMLESS or name in OVERRULED or name in _forced(fields):
            continue
        if name not in REFUSED:
            raise ApiError(400, f"unknown field {name!r}: leave it out", code="unknown_parameter", param=name)
        neutral, hint = REFUSED[name]
        if value not in neutral and not (name == "tool_choice" and not fields.get("tools")):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise ApiError(400, f"{name}={shown} is not supported here: {hint}", code="unsupported_value", param=name)


def _to_message(message: _Message, index: int) -> Message:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise ApiError(400, f"{where}: role {message.role!r} is not one of {', '.join(ROLES)}", param=where)
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"{where}: only the assistant calls tools", param=where)
    return Message(
        role=ROLES[message.role],
        content=_text(message.content, where),
        tool_calls=tuple(_to_call(call, where) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
    )


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal"):
            raise ApiError(400, f"{where}: a part is of type {part.type!r}; this is a model of text", param=where)
    return "".join(part.text or part.refusal or "" for part in content)


def _to_call(call: _Call, where: str) -> ToolCall:
    try:
        arguments = read_arguments(call.function.arguments)
    except ValueError as error:
        raise ApiError(400, f"{where}: the arguments of {call.function.name!r}: {error}", param=where) from error
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Raises ValueError with the reason unless they are a JSON object that can be recorded."""
    try:
        arguments = json.loads(text or "{}", strict=False)
        msgspec.msgpack.encode(arguments)  # no lone surrogates, no integers beyond 64 bits
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not JSON that can be recorded: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError("not an object")
    return arguments


def answer_body(answer: ChatAnswer, *, model: str) -> dict[str, Any]:
    """The whole answer as one object."""
    message = message_body(answer.message)
    if answer.thought:
        message["reasoning_content"] = answer.thought
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(answer)}


def answer_events(answer: ChatAnswer, *, model: str, include_usage: bool) -> Iterator[bytes]:
    """The same answer as server-sent events."""
    head = _head("chat.completion.chunk", model)
    body = message_body(answer.message)
    calls = [{"index": i, **call} for i, call in enumerate(body.get("tool_calls", ()))]
    deltas: list[tuple[dict[str, Any], Finish | None]] = [({"role": "assistant", "content": ""}, None)]
    if answer.thought:
        deltas.append(({"reasoning_content": answer.thought}, None))
    if body["content"]:
        deltas.append(({"content": body["content"]}, None))
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    deltas.append(({}, answer.finish))
    for delta, finish in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield _event({**head, "choices": [choice], **({"usage": None} if include_usage else {})})
    if include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def message_body(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        body["tool_call_id"] = message.tool_call_id or ""
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return body


def models_body(model: str) -> dict[str, Any]:
    """The list of models, with one entry."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "agentrl"}]}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
