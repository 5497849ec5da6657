"""VLLMEngine: the client of a stock vLLM server in RL mode.

Every completion it returns is complete and consistent, also where the server died during the request. Updates of the
weights, and their proof, are in weight_updates.py. Independent of episodes, rewards and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from agentrl.engine.base import EngineState, Receivers, WeightUpdate
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_control import VLLMControl
from agentrl.engine.vllm_generation import VLLMGeneration
from agentrl.engine.weight_updates import UpdateSettings, WeightUpdater
from agentrl.errors import EngineGone
from agentrl.types import Completion, Sampling, TransferInit, WeightsRef


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
        url: base URL of the server, or a function that gives it where a restarted server may have another.
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
        url: str | Callable[[], str],
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
        self.control = VLLMControl(self._server)
        """The control routes of the server."""
        self._weights = WeightUpdater(
            self.control,
            updates or UpdateSettings(),
            weights_change=self._weights_change,
            num_starts=num_starts,
            end_server=end_server,
        )
        self._generation = VLLMGeneration(self._server, self.control, self._weights, on_tokens=on_tokens)

    async def __aenter__(self) -> Self:
        try:
            self._model = self._model or await self.control.only_model()
            self._generation.model = self._model
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
            "engine/salvaged_tokens": float(self._generation.num_salvaged_tokens),
        }

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids` ([T]). Cancelling the call aborts the request in the engine.

        After an engine died and returned, it continues the tokens that had arrived, with their logprobs and versions.
        A request with a seed is started again instead, and gives the same answer. Raises EngineError when the server
        fails or its record is not complete and consistent.
        """
        return await self._generation.generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    async def health(self) -> None:
        """Raises EngineError unless the server and its engine process live."""
        await self.control.health()

    async def recover(self) -> None:
        """After the server was gone: return once it serves known weights. Raises EngineError."""
        await self._weights.come_back(EngineGone(f"engine at {self.url} was out"))

    def states(self) -> tuple[EngineState, ...]:
        """See SharedEngines.states."""
        state = EngineState(
            url=self.url,
            model=self._model,
            version=self._weights.version,
            is_open=self._weights.status == "open",
            is_serving=self._weights.status != "unknown",
            num_refused=self._weights.num_refused,
        )
        return (state,)

    async def check(self, index: int) -> None:
        """See SharedEngines.check."""
        await self.recover()

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

    def _weights_change(self) -> None:
        self._generation.weights_change()
