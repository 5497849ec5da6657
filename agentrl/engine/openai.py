"""Client of a vLLM server that is not in RL mode, through /v1/completions with token ids: for evaluation only."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from agentrl.engine.generation_stream import GenerationStream
from agentrl.engine.vllm_client import VLLMServer
from agentrl.engine.vllm_control import VLLMControl
from agentrl.engine.vllm_engine import sampling_body
from agentrl.engine.vllm_schema import Completed, Content, Delta, Entry, Span
from agentrl.errors import ConfigError, EngineError, boundary
from agentrl.types import Completion, Sampling

VERSION = "0"


class OpenAIEngine:
    """Such a server says nothing of weight versions: every token is labelled version 0.

    Prompt and completion are token ids and logprobs as sampled, so the rollout code is the same.

    Args:
        url: base URL, without /v1.
        model: served name; None asks the server.
        request_timeout_s: deadline of a generation.
        token: what the server demands, where it demands one.
    """

    def __init__(
        self, url: str, *, model: str | None = None, request_timeout_s: float = 120.0, token: str | None = None
    ) -> None:
        self._server = VLLMServer(url, timeout_s=request_timeout_s, token=token)
        self._model = model or ""

    async def __aenter__(self) -> Self:
        try:
            self._model = self._model or await VLLMControl(self._server).only_model()
        except BaseException:
            await self._server.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request. Raises EngineError; ConfigError for a seed."""
        if sampling.seed is not None:
            raise ConfigError(
                f"the server at {self._server.url} cannot be asked whether it takes seeds, which can end vLLM on a "
                "CPU: set engine.request_seeds=false"
            )
        body = {
            **sampling_body(sampling),
            "model": self._model,
            "prompt": token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": request_id,
        }
        del body["detokenize"]
        reply = await self._server.post("/v1/completions", body, Completed)
        with boundary(EngineError, f"engine at {self._server.url}, request {request_id}"):
            choice = reply.choices[0]
            scored = zip(choice.token_ids, choice.logprobs.token_logprobs, strict=True)
            span = Span(version=VERSION, start=0, end=len(choice.token_ids))
            stream = GenerationStream(int(VERSION))
            stream.extend(
                Delta(
                    token_ids=choice.token_ids,
                    logprobs=Content(content=[Entry(token_id=token, logprob=logprob) for token, logprob in scored]),
                    finish_reason=choice.finish_reason,
                    weight_versions=[span] if choice.token_ids else [],
                )
            )
            return stream.completion()
