"""VLLMEngine: the client of a stock vLLM server in RL mode.

Every completion it returns is complete and consistent, also where the server died during the request. Updates of the
weights, and their proof, are in weight_updates.py. Independent of episodes, rewards and processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.engine.generation_stream import GenerationStream, UnlabelledWeights, joined
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_control import VLLMControl
from agentrl.engine.vllm_schema import Chunk
from agentrl.engine.weight_updates import UpdateSettings, WeightUpdater
from agentrl.errors import EngineError, EngineGone, boundary
from agentrl.types import Completion, FinishReason, Sampling, TransferInit, WeightsRef

MAX_BREAKS = 5  # interruptions of one request, after which it is not retried on a server that seems healthy
UNCERTAIN = 0.01
"""A token with a logprob below minus this has a different logprob at another temperature."""
SAME_LOGPROB = 1e-4
"""Two logprobs of a token that agree this closely were computed under the same temperature."""


class VLLMEngine:
    """Client of one vLLM server in RL mode, as `agentrl engine` starts it. Several clients may share a server.

    Logprobs are those of the distribution that was sampled from. At temperature 1 and top_p 1 this holds in any mode of
    the server; otherwise the server must run with `--logprobs-mode processed_logprobs` (`agentrl engine` sets it),
    which is checked before the first such request. At temperature 0 the distribution is a point and the logprobs are 0.
    A request with a seed is sent only to a server that reports that it can take one (`engine.request_seeds`): vLLM's
    CPU build crashes on it otherwise.

    Example:
        async with VLLMEngine("http://127.0.0.1:8000") as engine:
            completion = await engine.generate([1, 2, 3], Sampling(max_tokens=16), request_id="r1")

    Args:
        url: base URL of the server.
        model: served name; None asks the server.
        request_timeout_s: longest wait for an answer, or for its next tokens.
        updates: how weights are updated and proven.
        num_starts: number of starts of the server so far, if this process starts it.
        end_server: ends the server's process, if this process restarts it then.
        on_tokens: called whenever tokens of any answer arrive.
        token: the bearer token of the server, if it requires one (engine/vllm/auth_middleware.py).

    Raises on entering:
        EngineError: the server is not there, not in RL mode, or paused, or its version label is not a version.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        request_timeout_s: float = 120.0,
        updates: UpdateSettings | None = None,
        num_starts: Callable[[], int] = lambda: 1,
        end_server: Callable[[], None] | None = None,
        on_tokens: Callable[[], None] = lambda: None,
        token: str | None = None,
    ) -> None:
        self._server = VLLMHttpClient(url, timeout_s=request_timeout_s, token=token)
        self._model = model or ""
        self._streams: set[GenerationStream] = set()
        self._checking = asyncio.Lock()
        self._logprobs_checked = False
        self._seeds_checked = False
        self._num_salvaged_tokens = 0
        self._on_tokens = on_tokens
        self.control = VLLMControl(self._server)
        """The control routes of the server."""
        self._weights = WeightUpdater(
            self.control,
            updates or UpdateSettings(),
            url=self.url,
            weights_change=self._weights_change,
            num_starts=num_starts,
            end_server=end_server,
        )

    async def __aenter__(self) -> Self:
        try:
            self._model = self._model or await self.control.only_model()
            await self._weights.connect(self._model)
        except BaseException:
            await self._server.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._server.url

    @property
    def wants_weights(self) -> bool:
        """Whether only the learner can give it the current weights: it was restarted, or an update broke off."""
        return self._weights.wants_weights

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return {
            "engine/restarts": float(self._weights.num_restarts),
            "engine/salvaged_tokens": float(self._num_salvaged_tokens),
        }

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
            stream = GenerationStream(self._weights.version)
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
                self._num_salvaged_tokens += len(parts[-1].token_ids)
                if (finished := _finished(joined(parts), sampling)) is None:
                    continue
                parts = [finished]
            await self._weights.trusted()
            return _as_sampled(joined(parts), sampling)

    async def health(self) -> None:
        """Raises EngineError unless the server and its engine process live."""
        await self.control.health()

    async def recover(self) -> None:
        """After the server was gone: return once it serves known weights. Raises EngineError."""
        await self._weights.come_back(EngineGone(f"engine at {self.url} was out"))

    async def version(self) -> int:
        """The policy version of the weights the engine holds, as labelled by the last update. Raises EngineError."""
        return await self.control.version()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log p(token[t+1] | token[:t+1]) under the weights the engine holds now. [T] -> [T-1]. Raises EngineError."""
        return await self._weights.score(token_ids)

    async def receivers(self, policy_version: int) -> Receivers:
        """Itself, once it runs. Raises EngineError when it does not return in time."""
        await self._weights.running()
        return Receivers(engines=(f"{self.url}#{self._weights.num_restarts}",))

    async def init_transfer(self, init: TransferInit) -> None:
        """Join the learner's group. Raises EngineError; WeightsWanted where the server died meanwhile."""
        await self._weights.join(init.init_info)

    async def pause(self) -> None:
        """Stop at the next token until the next update; requests wait, and later go on. Raises EngineError."""
        await self._weights.pause()

    async def sleep(self) -> None:
        """Release the GPU memory of weights and KV cache until the next update; requests wait. Raises EngineError."""
        await self._weights.sleep()

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """Swap weights in flight and prove it; running requests continue, and their later tokens carry the new version.

        Raises:
            WeightSyncError: the weights could not be loaded, and the engine continues with the previous ones if these
                could be proven; or the engine does not hold the weights it was given and cannot be used any more.
        """
        return await self._weights.update(ref)

    async def _fill(
        self, stream: GenerationStream, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> Completion:
        body = {
            "request_id": request_id,
            "model": self._model,
            "token_ids": token_ids,
            "cache_salt": self._weights.salt,
            "sampling_params": sampling_body(sampling) | {"logprobs": 0},
            "stream": True,
            "return_token_ids": True,
        }
        self._streams.add(stream)
        try:
            with boundary(EngineError, f"engine at {self.url}, request {request_id}"):
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
                    raise EngineGone(f"engine at {self.url} was restarted: its weights have no version") from error
        finally:
            self._streams.discard(stream)

    def _weights_change(self) -> None:
        for stream in self._streams:
            stream.weights_change()

    async def _check_seeds(self, sampling: Sampling) -> None:
        """Raises EngineError where a seed could crash the server."""
        if self._seeds_checked or sampling.seed is None:
            return
        if not await self.control.takes_seeds():
            raise EngineError(
                f"engine at {self.url} was not started for seeds, which can crash vLLM on a CPU: start it with "
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
            raw = await self.score([0, *drawn.token_ids])
        pairs = [(a, b) for a, b in zip(drawn.behavior_logprobs, raw, strict=True) if b < -UNCERTAIN]
        if not pairs:  # the model is so certain that temperature changes nothing
            return
        if all(abs(a - b) < SAME_LOGPROB for a, b in pairs):
            raise EngineError(
                f"engine at {self.url} reports logprobs as if temperature, top_p and top_k were not set: with "
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
