"""vLLM's answers as typed records; fields that the client does not use are left out.

Example: `msgspec.json.decode(b'{"is_paused": false}', type=Paused)`.
"""

from __future__ import annotations

import msgspec


class Anything(msgspec.Struct):
    """An answer of which only the status code is used."""


class Paused(msgspec.Struct):
    """The answer of /is_paused."""

    is_paused: bool


class WeightInfo(msgspec.Struct):
    """The answer of /weight_info."""

    weight_version: str


class Results(msgspec.Struct):
    """The answer of /collective_rpc: one result per worker."""

    results: list[str | None] = []


class Model(msgspec.Struct):
    """One served model."""

    id: str


class Models(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[Model]


class ErrorMessage(msgspec.Struct):
    """The text of an error."""

    message: str


class Failure(msgspec.Struct):
    """The answer to a refused call."""

    error: ErrorMessage


class Usage(msgspec.Struct):
    """Token counts of the server."""

    prompt_tokens: int


class Entry(msgspec.Struct, gc=False):
    """A sampled token."""

    token_id: int
    logprob: float


class Content(msgspec.Struct):
    """One entry per token."""

    content: list[Entry]


class Span(msgspec.Struct):
    """Tokens [start, end) were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


class Woken(msgspec.Struct):
    """The answer of /wake_up: `awake`, or `sleeping` while some of its memory is still released."""

    status: str


class Delta(msgspec.Struct):
    """The next tokens of a streamed generation; the last delta has the finish reason and the version spans."""

    token_ids: list[int]
    logprobs: Content
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed /inference/v1/generate. The first repeats the prompt."""

    choices: list[Delta] = []
    prompt_token_ids: list[int] | None = None
    error: ErrorMessage | None = None


class PromptEntry(msgspec.Struct, gc=False):
    """A token of the prompt."""

    logprob: float


class Scored(msgspec.Struct):
    """The answer of /inference/v1/generate when asked for the logprobs of the prompt."""

    usage: Usage
    prompt_logprobs: list[dict[str, PromptEntry] | None]
