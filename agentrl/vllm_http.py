"""The wire of a vLLM server: JSON in, typed records out. Knows routes' answers and failures, and nothing of training.

Every failure is an EngineError that names the URL and the mend; an answer that does not fit its record is one too.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx
import msgspec

from agentrl.errors import EngineError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0  # vLLM's server closes idle connections after 5 s: we must be first
RETRY_PAUSED_S = 0.05

MENDS = {
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1, and ask for a model it serves",
    500: "see the engine's log",
    503: "it is paused or shutting down; see the engine's log",
}


class VLLMServer:
    """One server. Cancelling a call closes its connection, by which vLLM knows to abort the request.

    Every call in progress has a client with one connection of its own: a shared connection pool of httpx takes time
    in the square of its idle connections for each request (measured: 4 ms a request at 64).
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._clients: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def get(self, path: str, reply: type[T]) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("GET", path, None, reply)

    async def post(self, path: str, body: dict[str, Any] | None, reply: type[T]) -> T:
        """The answer as `reply`. Raises EngineError."""
        return await self._call("POST", path, body, reply)

    async def _request(self, method: str, path: str, content: bytes) -> httpx.Response:
        client = self._idle.pop() if self._idle else self._new_client()
        try:
            return await client.request(method, path, content=content)
        finally:
            self._idle.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEEPALIVE_S),
            headers={"content-type": "application/json"},
            trust_env=False,
            verify=self._ssl,
        )
        self._clients.append(client)
        return client

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, reply: type[T]) -> T:
        """Raises EngineError for a server that is gone, slow, refuses, or answers what `reply` does not fit."""
        what = f"engine at {self.url}: {method} {path.partition('?')[0]}"
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._request(method, path, content=content)
                while response.status_code == 503:
                    await asyncio.sleep(RETRY_PAUSED_S)
                    response = await self._request(method, path, content=content)
        except TimeoutError as error:
            raise EngineError(f"{what} was not answered within {self._timeout_s:g} s; see the engine's log") from error
        except httpx.ConnectError as error:
            raise EngineError(f"{what}: nothing listens there; is the engine running? ({error})") from error
        except httpx.TransportError as error:
            raise EngineError(f"{what}: the connection broke ({type(error).__name__}); see the engine's log") from error
        if response.status_code != 200:
            mend = MENDS.get(response.status_code)
            raise EngineError(
                f"{what} failed with status {response.status_code}: {_reason(response)}" + (f"; {mend}" if mend else "")
            )
        try:
            return msgspec.json.decode(response.content, type=reply)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{what} answered what this client does not understand: {error}") from error


def _reason(response: httpx.Response) -> str:
    """The server's own words, short."""
    try:
        text = msgspec.json.decode(response.content, type=Failure).error.message
    except msgspec.MsgspecError:
        text = response.text
    return text.strip()[:500] or "no reason given"


# vLLM's answers, as far as they are used.


class Anything(msgspec.Struct):
    """Only the status counts."""


class Paused(msgspec.Struct):
    """Of /is_paused."""

    is_paused: bool


class WeightInfo(msgspec.Struct):
    """Of /weight_info."""

    weight_version: str


class Model(msgspec.Struct):
    """One served model."""

    id: str


class Models(msgspec.Struct):
    """Of /v1/models."""

    data: list[Model]


class Message(msgspec.Struct):
    """The server's words."""

    message: str


class Failure(msgspec.Struct):
    """Of a refused call."""

    error: Message


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


class Choice(msgspec.Struct):
    """One generation."""

    token_ids: list[int]
    logprobs: Content
    finish_reason: str
    weight_versions: list[Span] | None = None


class PromptEntry(msgspec.Struct, gc=False):
    """A token of the prompt."""

    logprob: float


class Generated(msgspec.Struct):
    """Of /inference/v1/generate."""

    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptEntry] | None] | None = None


class TokenLogprobs(msgspec.Struct):
    """One logprob a token."""

    token_logprobs: list[float]


class CompletedChoice(msgspec.Struct):
    """One generation."""

    token_ids: list[int]
    logprobs: TokenLogprobs
    finish_reason: str


class Completed(msgspec.Struct):
    """Of /v1/completions."""

    choices: list[CompletedChoice]
