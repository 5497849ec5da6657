"""vLLM's answers as typed records, as far as they are used. Knows no routes and no failures of the network."""

from __future__ import annotations

import msgspec


class Anything(msgspec.Struct):
    """Only the status counts."""


class Paused(msgspec.Struct):
    """Of /is_paused."""

    is_paused: bool


class WeightInfo(msgspec.Struct):
    """Of /weight_info."""

    weight_version: str


class Results(msgspec.Struct):
    """Of /collective_rpc: one answer a worker."""

    results: list[str | None] = []


class Model(msgspec.Struct):
    """One served model."""

    id: str


class Models(msgspec.Struct):
    """Of /v1/models."""

    data: list[Model]


class ErrorMessage(msgspec.Struct):
    """The server's words."""

    message: str


class Failure(msgspec.Struct):
    """Of a refused call."""

    error: ErrorMessage


class Usage(msgspec.Struct):
    """How many tokens the server counted."""

    prompt_tokens: int


class Entry(msgspec.Struct, gc=False):
    """A sampled token."""

    token_id: int
    logprob: float


class Content(msgspec.Struct):
    """One entry a token."""

    content: list[Entry]


class Span(msgspec.Struct):
    """Tokens [start, end) were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


class Delta(msgspec.Struct):
    """The next tokens of a streamed generation; the last one says how it ended and which weights made what."""

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
    """Of /inference/v1/generate, asked for the logprobs of the prompt."""

    usage: Usage
    prompt_logprobs: list[dict[str, PromptEntry] | None]
