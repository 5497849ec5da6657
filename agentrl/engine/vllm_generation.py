"""Requests to a vLLM server: streamed, checked, and continued or repeated after an engine died.

Independent of who updates the weights: the engine client of a run (vllm_engine.py), or the orchestrator, which a
rollout worker follows (followed.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from agentrl.engine.generation_stream import GenerationStream, UnlabelledWeights, joined
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_control import VLLMControl
from agentrl.engine.vllm_schema import Chunk
from agentrl.errors import EngineError, EngineGone, boundary
from agentrl.types import Completion, FinishReason, Sampling

MAX_BREAKS = 5  # interruptions of one request, after which it is not retried on a server that seems healthy
UNCERTAIN = 0.01
"""A token with a logprob below minus this has a different logprob at another temperature."""
SAME_LOGPROB = 1e-4
"""Two logprobs of a token that agree this closely were computed under the same temperature."""


class ServedWeights(Protocol):
    """What a request must know about the weights of its server. Example: `WeightUpdater`."""

    @property
    def version(self) -> int:
        """Of the weights that it holds."""
        ...

    @property
    def salt(self) -> str:
        """Separates the prefix-cache entries of one version from requests under another."""
        ...

    async def trusted(self) -> None:
        """Wait while weights change. Raises WeightSyncError when the server's weights are unknown."""
        ...

    async def come_back(self, error: EngineError) -> None:
        """After a request failed: return once the server serves the current weights. Raises `error` if it was never
        gone, EngineGone if it does not return."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log p(token[t+1] | token[:t+1]) under the weights it holds now. [T] -> [T-1]. Raises EngineError."""
        ...


class VLLMGeneration:
    """The requests of one client to one server.

    Args:
        on_tokens: called whenever tokens of any answer arrive.
        salvages: whether the tokens that had arrived before an engine died are kept. That needs `weights_change` to be
            called before the server resumes with new weights; otherwise a request is repeated from its beginning.

    Example:
        generation = VLLMGeneration(server, VLLMControl(server), weights)
        generation.model = "policy"
        completion = await generation.generate([1, 2, 3], Sampling(max_tokens=16), request_id="r1")
    """

    def __init__(
        self,
        server: VLLMHttpClient,
        control: VLLMControl,
        weights: ServedWeights,
        *,
        on_tokens: Callable[[], None] = lambda: None,
        salvages: bool = True,
    ) -> None:
        self._server = server
        self._control = control
        self._weights = weights
        self._on_tokens = on_tokens
        self._salvages = salvages
        self._streams: set[GenerationStream] = set()
        self._checking = asyncio.Lock()
        self._logprobs_checked = False
        self._seeds_checked = False
        self.model = ""
        """The served name."""
        self.num_salvaged_tokens = 0
        """Tokens kept of answers that broke off, since the start."""

    def weights_change(self) -> None:
        """A weight update begins."""
        for stream in self._streams:
            stream.weights_change()

    def _stream(self) -> GenerationStream:
        stream = GenerationStream(self._weights.version)
        if not self._salvages:
            stream.weights_change()
        return stream

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids` ([T]). Cancelling the call aborts the request in the engine.

        After an engine died and returned, it continues the tokens that had arrived, with their logprobs and versions.
        A request with a seed is started again instead, and gives the same answer. Raises EngineError when the server
        fails or its record is not complete and consistent.
        """
        await self._check_logprobs(sampling)
        parts: list[Completion] = []
        num_breaks = 0
        while True:
            await self._weights.trusted()
            so_far = [token for part in parts for token in part.token_ids]
            left = replace(sampling, max_tokens=sampling.max_tokens - len(so_far))
            name = f"{request_id}~{num_breaks}" if num_breaks else request_id
            stream = self._stream()
            try:
                await self._check_seeds(sampling)
                parts.append(await self._fill(stream, [*token_ids, *so_far], left, name))
            except EngineError as error:
                if num_breaks == MAX_BREAKS:
                    raise
                num_breaks += 1
                await self._weights.come_back(error)
                # the rest would be sampled with the first random numbers of the seed again
                if sampling.seed is not None:
                    continue
                parts.append(stream.certain_part(sampling))
                self.num_salvaged_tokens += len(parts[-1].token_ids)
                if (finished := _finished(joined(parts), sampling)) is None:
                    continue
                parts = [finished]
            await self._weights.trusted()
            return _as_sampled(joined(parts), sampling)

    async def _fill(
        self, stream: GenerationStream, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> Completion:
        body = {
            "request_id": request_id,
            "model": self.model,
            "token_ids": token_ids,
            "cache_salt": self._weights.salt,
            "sampling_params": sampling_body(sampling) | {"logprobs": 0},
            "stream": True,
            "return_token_ids": True,
        }
        self._streams.add(stream)
        try:
            with boundary(EngineError, f"engine at {self._server.url}, request {request_id}"):
                prompt_seen = False
                async with aclosing(self._server.stream("/inference/v1/generate", body)) as chunks:
                    async for chunk in chunks:
                        prompt_seen = _check_chunk(chunk, token_ids) or prompt_seen
                        for delta in chunk.choices:
                            stream.extend(delta)
                            self._on_tokens()
                if not prompt_seen:
                    raise ValueError("the answer does not repeat the prompt")
                try:
                    return stream.completion()
                except UnlabelledWeights as error:
                    what = f"engine at {self._server.url} was restarted: its weights have no version"
                    raise EngineGone(what) from error
        finally:
            self._streams.discard(stream)

    async def _check_seeds(self, sampling: Sampling) -> None:
        """Raises EngineError where a seed could crash the server."""
        if self._seeds_checked or sampling.seed is None:
            return
        if not await self._control.takes_seeds():
            raise EngineError(
                f"engine at {self._server.url} was not started for seeds, which can crash vLLM on a CPU: start it with "
                "`agentrl engine` and engine.request_seeds=true, or set engine.request_seeds=false"
            )
        self._seeds_checked = True

    async def _check_logprobs(self, sampling: Sampling) -> None:
        """Raises EngineError where temperature, top_p or top_k would make the server's logprobs wrong."""
        if self._logprobs_checked or sampling.is_unmodified or sampling.temperature == 0:
            return
        async with self._checking:
            await self._weights.trusted()
            hot = Sampling(max_tokens=8, temperature=2.0)
            drawn = await self._fill(
                GenerationStream(self._weights.version), [0], hot, f"logprobs-mode-{time.monotonic_ns()}"
            )
            raw = await self._weights.score([0, *drawn.token_ids])
        pairs = [(a, b) for a, b in zip(drawn.behavior_logprobs, raw, strict=True) if b < -UNCERTAIN]
        if not pairs:  # the model is so certain that temperature changes nothing
            return
        if all(abs(a - b) < SAME_LOGPROB for a, b in pairs):
            raise EngineError(
                f"engine at {self._server.url} reports logprobs as if temperature, top_p and top_k were not set: with "
                f"temperature={sampling.temperature:g} top_p={sampling.top_p:g} top_k={sampling.top_k} they would be "
                "wrong. Start vLLM with --logprobs-mode processed_logprobs"
            )
        self._logprobs_checked = True


def sampling_body(sampling: Sampling) -> dict[str, Any]:
    """vLLM's sampling parameters, with every modifier that a server could default to another value."""
    seed = {} if sampling.seed is None else {"seed": sampling.seed}
    return seed | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sampling.stop_token_ids,
        "stop": sampling.stop,
        "detokenize": bool(sampling.stop),
    }


def _check_chunk(chunk: Chunk, token_ids: Sequence[int]) -> bool:
    """Whether the event repeats the prompt. Raises ValueError for another prompt or several choices."""
    if len(chunk.choices) > 1:
        raise ValueError(f"{len(chunk.choices)} choices where one was requested")
    if chunk.prompt_token_ids is None:
        return False
    if chunk.prompt_token_ids != list(token_ids):
        raise ValueError(f"it read another prompt: {len(chunk.prompt_token_ids)} tokens instead of {len(token_ids)}")
    return True


def _finished(so_far: Completion, sampling: Sampling) -> Completion | None:
    """`so_far` with its finish reason, where only the last event was lost; None where tokens are missing."""
    if len(so_far.token_ids) >= sampling.max_tokens:
        return replace(so_far, finish_reason=FinishReason.LENGTH)
    if so_far.token_ids and so_far.token_ids[-1] in sampling.stop_token_ids:
        return replace(so_far, finish_reason=FinishReason.STOP)
    return None


def _as_sampled(completion: Completion, sampling: Sampling) -> Completion:
    """At temperature 0 every token was certain, whatever logprobs the server reports."""
    if sampling.temperature > 0:
        return completion
    return replace(completion, behavior_logprobs=(0.0,) * len(completion.token_ids))
