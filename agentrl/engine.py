"""Engine: what the rollout asks of whatever generates tokens, and the HTTP clients of stock vLLM servers.

Knows vLLM's wire format and nothing of episodes, rewards or processes. Every answer is decoded into typed records; what
does not fit them is an EngineError, never a guess.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from agentrl.errors import EngineError, WeightSyncError, boundary
from agentrl.types import Completion, FinishReason, Probe, Sampling, VersionSpan, WeightsRef
from agentrl.vllm_http import Anything, Completed, Generated, Models, Paused, VLLMServer, WeightInfo

KvOnUpdate = Literal["stale", "recompute"]

LOGPROB_UNKNOWN = -9999.0  # what vLLM sends for NaN, -inf, or a token it has no entry for
INITIAL_LABEL = "default"  # vLLM's version label until somebody sets one


class Engine(Protocol):
    """Token ids in; token ids, logprobs and version spans out. Raises EngineError for anything else."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request in the engine."""
        ...

    async def update_weights(self, ref: WeightsRef) -> float:
        """Swap weights in flight; returns the seconds generation stood still. Raises WeightSyncError."""
        ...


class _Client:
    """What both clients share: the server, and its life as an async context."""

    def __init__(self, url: str, *, model: str | None = None, request_timeout_s: float = 120.0) -> None:
        self._server = VLLMServer(url, timeout_s=request_timeout_s)
        self._model = model or ""

    async def __aenter__(self) -> Self:
        try:
            if not self._model:
                models = await self._server.get("/v1/models", Models)
                if len(models.data) != 1:
                    raise EngineError(f"engine at {self.url} serves {[m.id for m in models.data]}: name the model")
                self._model = models.data[0].id
            await self._connected()
        except BaseException:
            await self._server.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    async def _connected(self) -> None:
        """Checks of a subclass, once the server answers."""

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._server.url


class VLLMEngine(_Client):
    """Client of one vLLM server in RL mode, as `agentrl engine` starts it. Several may be used side by side.

    Logprobs are those of the distribution sampled from if the server runs with `--logprobs-mode processed_logprobs`
    (ours does); at temperature 1, top_p 1 every mode is exact. No per-request seed is ever sent: it crashes vLLM's CPU
    build on preemption.

    Args:
        url: base URL of the server.
        model: served name; None asks the server.
        request_timeout_s: deadline of every call, generation included.
        kv_on_update: whether requests that run across an update keep their KV entries or have them recomputed.
            Prefix-cache entries never serve requests that start under another version: each version has its salt.
        parity_bound: largest allowed |engine - learner| logprob on the probe.

    Raises on entering:
        EngineError: no server, not in RL mode, paused, or with a version label that is no version.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        request_timeout_s: float = 120.0,
        kv_on_update: KvOnUpdate = "recompute",
        parity_bound: float = 1e-3,
    ) -> None:
        super().__init__(url, model=model, request_timeout_s=request_timeout_s)
        self._clear_cache = kv_on_update == "recompute"
        self._parity_bound = parity_bound
        self._cache_salt = ""
        self._open = asyncio.Event()  # closed while weights change: nothing starts under the old version's salt
        self._open.set()
        self._distrust: WeightSyncError | None = None
        self.last_parity = 0.0
        """Largest |engine - learner| logprob on the probe of the last update."""

    async def _connected(self) -> None:
        if (await self._server.get("/is_paused", Paused)).is_paused:
            raise EngineError(
                f"engine at {self.url} is paused: a weight update was cut off and its weights are unknown; restart it"
            )
        label = (await self._server.get("/weight_info", WeightInfo)).weight_version
        if label == INITIAL_LABEL:
            # Unlabelled are exactly the weights the server was started with, which the run calls version 0.
            await self._server.post("/update_weight_version", {"new_version": "0"}, Anything)
        self._cache_salt = f"v{await self.version()}"

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continue `token_ids` ([T]). Cancelling the call aborts the request in the engine.

        Raises EngineError when the server fails or its record is not complete and consistent.
        """
        await self._open.wait()  # ends with update_weights, each call of which has its deadline
        if self._distrust is not None:
            raise self._distrust
        reply = await self._generate(token_ids, {**_sampling_body(sampling), "logprobs": 0}, request_id)
        with boundary(EngineError, f"engine at {self.url}, request {request_id}"):
            choice = reply.choices[0]
            return _completion(
                token_ids=choice.token_ids,
                scored=[(entry.token_id, entry.logprob) for entry in choice.logprobs.content],
                spans=tuple(
                    VersionSpan(version=_version(s.version), start=s.start, end=s.end)
                    for s in choice.weight_versions or ()
                ),
                finish_reason=choice.finish_reason,
            )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log p(token[t+1] | token[:t+1]) under the weights the engine holds now. [T] -> [T-1]. Raises EngineError."""
        reply = await self._generate(
            token_ids, {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0, "detokenize": False}, None
        )
        with boundary(EngineError, f"engine at {self.url}, scoring {len(token_ids)} tokens"):
            if reply.prompt_logprobs is None or len(reply.prompt_logprobs) != len(token_ids):
                raise ValueError("not one prompt logprob for every token")
            later = zip(token_ids[1:], reply.prompt_logprobs[1:], strict=True)
            return [(entries or {})[str(token)].logprob for token, entries in later]

    async def _generate(self, token_ids: Sequence[int], sampling: dict[str, Any], request_id: str | None) -> Generated:
        body: dict[str, Any] = {
            "model": self._model,
            "token_ids": token_ids,
            "cache_salt": self._cache_salt,
            "sampling_params": sampling,
        }
        if request_id is not None:
            body["request_id"] = request_id
        reply = await self._server.post("/inference/v1/generate", body, Generated)
        if reply.usage.prompt_tokens != len(token_ids) or len(reply.choices) != 1:
            raise EngineError(
                f"engine at {self.url} answered {len(reply.choices)} choices to {reply.usage.prompt_tokens} prompt "
                f"tokens; asked was 1 to {len(token_ids)}"
            )
        return reply

    async def health(self) -> None:
        """Raises EngineError unless the server and its engine process live."""
        await self._server.get("/version", Anything)
        await self.version()

    async def version(self) -> int:
        """The policy version of the weights the engine holds, as labelled by the last update. Raises EngineError."""
        with boundary(EngineError, f"engine at {self.url}"):
            return _version((await self._server.get("/weight_info", WeightInfo)).weight_version)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End running requests; their callers get what was written so far, with finish_reason abort."""
        if request_ids:  # an empty list would abort everybody's
            body = {"request_ids": [f"generate-tokens-{request_id}" for request_id in request_ids]}
            await self._server.post("/abort_requests", body, Anything)

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop after the current token; running requests wait. `clear_cache`: their KV is recomputed on resume."""
        await self._server.post(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", None, Anything)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._server.post("/resume", None, Anything)

    async def update_weights(self, ref: WeightsRef) -> float:
        """Swap weights in flight and prove it; running requests go on, their later tokens carry the new version.

        Returns:
            Seconds generation stood still.

        Raises:
            WeightSyncError: the weights could not be loaded (the engine is then left paused: its weights are unknown),
                or the engine does not reproduce the learner's logprobs of `ref.probe`. Ends the run in either case.
        """
        update = f"weights of version {ref.policy_version} from {ref.path}"
        self._distrust = WeightSyncError(f"{update}: the update of {self.url} was cut off; restart the engine")
        self._open.clear()
        try:
            started = time.monotonic()
            await self._swap(ref)
            gap_s = time.monotonic() - started
            await self._prove(ref.probe)
            self._distrust = None
            return gap_s
        except EngineError as error:
            self._distrust = WeightSyncError(f"{update}: {error}")
            raise self._distrust from error
        finally:
            self._open.set()

    async def _swap(self, ref: WeightsRef) -> None:
        await self.pause(clear_cache=self._clear_cache)
        await self._server.post("/start_weight_update", None, Anything)
        await self._server.post("/update_weights", {"update_info": {"path": ref.path}}, Anything)
        await self._server.post("/finish_weight_update", {"weight_version": str(ref.policy_version)}, Anything)
        if (version := await self.version()) != ref.policy_version:
            raise EngineError(f"engine at {self.url} reports version {version} after the update")
        self._cache_salt = f"v{version}"
        await self.resume()

    async def _prove(self, probe: Probe) -> None:
        scored = await self.score(probe.token_ids)
        self.last_parity = max(abs(ours - theirs) for ours, theirs in zip(scored, probe.logprobs, strict=True))
        if not self.last_parity <= self._parity_bound:  # NaN fails too
            raise EngineError(
                f"engine at {self.url} does not hold the learner's weights: its logprobs of the probe text differ by "
                f"{self.last_parity:.2g}, allowed is {self._parity_bound:g} (engine.parity_bound)"
            )


class OpenAIEngine(_Client):
    """Client of any vLLM server through /v1/completions with token ids. For evaluation only.

    Such a server says nothing of weight versions: every token is labelled version 0. Prompt and completion are token
    ids and logprobs as sampled, so the rollout code is the same.
    """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the request. Raises EngineError."""
        body = {
            **_sampling_body(sampling),
            "model": self._model,
            "prompt": token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": request_id,
        }
        del body["detokenize"]
        reply = await self._server.post("/v1/completions", body, Completed)
        with boundary(EngineError, f"engine at {self.url}, request {request_id}"):
            choice = reply.choices[0]
            num_tokens = len(choice.token_ids)
            return _completion(
                token_ids=choice.token_ids,
                scored=list(zip(choice.token_ids, choice.logprobs.token_logprobs, strict=True)),
                spans=(VersionSpan(version=0, start=0, end=num_tokens),) if num_tokens else (),
                finish_reason=choice.finish_reason,
            )

    async def update_weights(self, ref: WeightsRef) -> float:
        """Not possible. Raises WeightSyncError."""
        raise WeightSyncError(f"engine at {self.url} is used for evaluation only: its weights cannot be changed")


def _sampling_body(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "detokenize": False,
    }


def _completion(
    *, token_ids: list[int], scored: list[tuple[int, float]], spans: tuple[VersionSpan, ...], finish_reason: str
) -> Completion:
    """Raises ValueError when ids and scored ids differ, a logprob is a placeholder, or Completion refuses."""
    if [token for token, _ in scored] != token_ids:
        raise ValueError("the logprobs are not those of the tokens")
    if any(logprob <= LOGPROB_UNKNOWN for _, logprob in scored):
        raise ValueError("a token has no finite logprob: the model's logits are NaN or infinite")
    return Completion(
        token_ids=tuple(token_ids),
        behavior_logprobs=tuple(logprob for _, logprob in scored),
        version_spans=spans,
        finish_reason=FinishReason(finish_reason),
    )


def _version(label: str) -> int:
    if not (label.isascii() and label.isdigit()):
        raise ValueError(
            f"weight version {label!r} is not a policy version: was the engine restarted, or updated by others?"
        )
    return int(label)
