"""The control routes of a vLLM server in RL mode, one method each. The order of calls is up to weight_updates.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from agentrl.engine.generation_stream import version_of
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_schema import Anything, Models, Paused, Results, Scored, WeightInfo, Woken
from agentrl.errors import EngineError, EngineGone, boundary

log = logging.getLogger(__name__)

ALREADY_STARTED = "already active"  # in what vLLM says to a second /start_weight_update
HEALTH_TIMEOUT_S = 5.0
YES = "yes"


class VLLMControl:
    """One server's control routes. Every method raises EngineError, and EngineGone where the server cannot be reached.

    Example:
        control = VLLMControl(VLLMHttpClient(url, timeout_s=10))
        await control.pause(clear_cache=False)
        await control.resume()
    """

    def __init__(self, server: VLLMHttpClient) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._server.url

    async def only_model(self) -> str:
        """The name of the only model it serves."""
        models = await self._server.get("/v1/models", Models)
        if len(models.data) != 1:
            raise EngineError(f"engine at {self._server.url} serves {[m.id for m in models.data]}: name the model")
        return models.data[0].id

    async def health(self) -> None:
        """Raises EngineGone unless the server and its engine process run."""
        if (status := await self._server.status("/health", timeout_s=HEALTH_TIMEOUT_S)) != 200:
            raise EngineGone(f"engine at {self._server.url}: its engine process is dead (/health says {status})")

    async def is_gone(self) -> bool:
        """Whether it cannot be reached, or its engine process is dead. A server that is only slow is not gone."""
        try:
            await self.health()
        except EngineGone:
            return True
        except EngineError:
            return False
        return False

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return (await self._server.get("/is_paused", Paused)).is_paused

    async def label(self) -> str:
        """The label of the weights it holds."""
        return (await self._server.get("/weight_info", WeightInfo)).weight_version

    async def set_label(self, label: str) -> None:
        """Label the weights it holds."""
        await self._server.post("/update_weight_version", {"new_version": label}, Anything)

    async def version(self) -> int:
        """The policy version of the weights it holds, as labelled by the last update."""
        with boundary(EngineError, f"engine at {self._server.url}"):
            return version_of(await self.label())

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End running requests; their callers get the tokens so far, with finish_reason abort."""
        if request_ids:  # an empty list would abort all requests of the server
            body = {"request_ids": [f"generate-tokens-{request_id}" for request_id in request_ids]}
            await self._server.post("/abort_requests", body, Anything)

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop after the current token; running requests wait. `clear_cache`: their KV entries are recomputed later."""
        await self._server.post(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", None, Anything)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._server.post("/resume", None, Anything)

    async def sleep(self, *, timeout_s: float) -> None:
        """Stop as `pause` does, and release the memory of weights and KV cache, whose contents are lost.

        Running requests wait; their KV entries are computed again later. A CPU build only stops: see `can_sleep`.
        """
        await self._server.post("/sleep?level=2&mode=keep", None, Anything, timeout_s=timeout_s)

    async def wake_up(self, part: Literal["weights", "kv_cache"], *, timeout_s: float) -> bool:
        """Take the memory of `part` again, with undefined contents. Returns whether the server is wholly awake.

        It generates again as soon as it is wholly awake, so the weights must be there before the KV cache is woken.
        """
        return (await self._server.post(f"/wake_up?tags={part}", None, Woken, timeout_s=timeout_s)).status == "awake"

    async def can_sleep(self) -> bool:
        """Whether `sleep` releases memory. False for a CPU, and for a server without our worker extension."""
        return await self._every_worker_says_yes("can_sleep")

    async def init_transfer(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Join the learner's group; returns when the learner has joined too."""
        await self._server.post("/init_weight_transfer_engine", {"init_info": init_info}, Anything, timeout_s=timeout_s)

    async def load(self, update_info: dict[str, Any], *, version: int, timeout_s: float) -> None:
        """Take new weights through vLLM's weight transfer, and label them `version`."""
        try:
            await self._server.post("/start_weight_update", None, Anything)
        except EngineError as error:
            if ALREADY_STARTED not in str(error):  # an interrupted update is restarted by sending everything
                raise
        await self._server.post("/update_weights", {"update_info": update_info}, Anything, timeout_s=timeout_s)
        await self._server.post(
            "/finish_weight_update", {"weight_version": str(version)}, Anything, timeout_s=timeout_s
        )

    async def reload(self, path: str, *, version: int, timeout_s: float) -> None:
        """Take new weights from a folder by the route that every vLLM has, and label them `version`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._server.post("/collective_rpc", body, Anything, timeout_s=timeout_s)
        try:
            await self._server.post("/collective_rpc", {"method": "renew_tied_layers"}, Anything, timeout_s=timeout_s)
        except EngineError as error:
            # A server without our worker extension; only vLLM's CPU build needs it, and the probe finds out.
            log.debug("%s", error)
        await self.set_label(str(version))

    async def checksums(self) -> list[str | None]:
        """The checksum (agentrl.engine.checksum) of what each worker took in the last update."""
        return (await self._server.post("/collective_rpc", {"method": "weights_checksum"}, Results)).results

    async def takes_seeds(self) -> bool:
        """Whether a request may carry a seed. False for a server without our worker extension."""
        return await self._every_worker_says_yes("takes_seeds")

    async def score(self, token_ids: Sequence[int], *, model: str, cache_salt: str) -> list[float]:
        """Log p(token[t+1] | token[:t+1]) under the weights it holds now. [T] -> [T-1]"""
        body = {
            "model": model,
            "token_ids": token_ids,
            "cache_salt": cache_salt,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        scored = await self._server.post("/inference/v1/generate", body, Scored)
        with boundary(EngineError, f"engine at {self._server.url}, scoring {len(token_ids)} tokens"):
            if not scored.usage.prompt_tokens == len(scored.prompt_logprobs) == len(token_ids):
                raise ValueError("not one prompt logprob for every token")
            later = zip(token_ids[1:], scored.prompt_logprobs[1:], strict=True)
            return [(entries or {})[str(token)].logprob for token, entries in later]

    async def _every_worker_says_yes(self, method: str) -> bool:
        try:
            reply = await self._server.post("/collective_rpc", {"method": method}, Results)
        except EngineGone:
            raise
        except EngineError as error:
            log.debug("%s", error)
            return False
        return bool(reply.results) and all(result == YES for result in reply.results)
