"""Engines whose weights another process updates: what a rollout worker generates with.

The process that updates them (the orchestrator) tells which version each engine is proven to hold. No update waits for
this side, which may learn of it late; so it is the answers that are checked: tokens of a version count only once the
engine is proven to hold that version. Independent of how the states get here, and of episodes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from agentrl.engine.base import Engine, EngineState
from agentrl.engine.vllm_client import VLLMHttpClient
from agentrl.engine.vllm_control import VLLMControl
from agentrl.engine.vllm_generation import VLLMGeneration
from agentrl.errors import EngineError, EngineGone
from agentrl.supervision.backoff import backoff_s
from agentrl.types import Completion, Sampling

MAX_SESSIONS = 100_000
RETRY_S = 0.2
"""Pause before a request is sent again to an engine that the orchestrator finds healthy; doubles with each."""

ReportFailure = Callable[[int, int, EngineError], Awaitable[None]]
"""Called with (index of an engine, its `num_checks`, why a request to it failed): asks for a look at it."""


class EngineStates:
    """The last known states of all engines.

    Example:
        states.apply(orders.engines)
        await states.until(lambda: states.of(0).is_open)
    """

    def __init__(self) -> None:
        self._states: tuple[EngineState, ...] = ()
        self._changed = asyncio.Event()

    def apply(self, states: Sequence[EngineState]) -> None:
        """These are the states now."""
        self._states = tuple(states)
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, index: int) -> EngineState:
        """The state of one engine."""
        return self._states[index]

    def __len__(self) -> int:
        return len(self._states)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return as soon as it is so. Whoever calls it has a deadline: that of the episode."""
        while not is_so():
            await self._changed.wait()


class FollowedWeights:
    """What a request must know about the weights of one engine (see ServedWeights), taken from its state.

    Example:
        weights = FollowedWeights(0, states, VLLMControl(server), link.engine_failed)
        await weights.trusted()
    """

    def __init__(self, index: int, states: EngineStates, control: VLLMControl, report: ReportFailure) -> None:
        self._index = index
        self._states = states
        self._control = control
        self._report = report
        self._num_failures = 0  # in a row, of an engine that the orchestrator finds healthy

    @property
    def state(self) -> EngineState:
        """The last known state of the engine."""
        return self._states.of(self._index)

    @property
    def version(self) -> int:
        """See ServedWeights."""
        return self.state.version

    @property
    def salt(self) -> str:
        """See ServedWeights: as the orchestrator's client writes it."""
        return f"v{self.version}"

    async def trusted(self) -> None:
        """Wait while weights change. Raises EngineGone when the engine is out."""
        await self._states.until(lambda: self.state.is_open or not self.state.is_serving)
        self._check_serving()

    async def accepted(self, completion: Completion, num_refused: int) -> bool:
        """Whether all of its tokens are of proven weights; waits until that is known.

        `num_refused`: failed updates when the request began. Raises EngineGone when the engine is out.
        """
        newest = max(span.version for span in completion.version_spans)
        await self._states.until(
            lambda: (
                (self.state.version >= newest and self.state.is_open)
                or self.state.num_refused != num_refused
                or not self.state.is_serving
            )
        )
        self._check_serving()
        self._num_failures = 0
        return self.state.num_refused == num_refused

    async def come_back(self, error: EngineError) -> None:
        """Have the orchestrator look at the engine, and return once it serves. Raises `error` if it was never gone,
        EngineGone when it is out."""
        if not isinstance(error, EngineGone) and not await self._control.is_gone():
            raise error
        seen = self.state.num_checks
        await self._report(self._index, seen, error)
        await self._states.until(lambda: self.state.num_checks != seen or not self.state.is_serving)
        self._check_serving(error)
        self._num_failures += 1
        await asyncio.sleep(backoff_s(self._num_failures, base_s=RETRY_S))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See ServedWeights."""
        return await self._control.score(token_ids, model=self.state.model, cache_salt=self.salt)

    def _check_serving(self, cause: EngineError | None = None) -> None:
        if not self.state.is_serving:
            raise EngineGone(f"engine at {self.state.url} is out: {cause or 'the orchestrator took it out'}") from cause


class FollowedEngine:
    """One of them. A server that returns at another URL is another FollowedEngine.

    Example:
        engine = FollowedEngine(0, states, report, timeout_s=120, token=None, on_tokens=lambda: None)
        completion = await engine.generate(prompt_ids, sampling, "r1@3fa4", "episode 1")
    """

    def __init__(
        self,
        index: int,
        states: EngineStates,
        report: ReportFailure,
        *,
        timeout_s: float,
        token: str | None,
        on_tokens: Callable[[], None],
    ) -> None:
        self.url = states.of(index).url
        self._server = VLLMHttpClient(self.url, timeout_s=timeout_s, token=token)
        control = VLLMControl(self._server)
        self.weights = FollowedWeights(index, states, control, report)
        """What is known of its weights."""
        self._generation = VLLMGeneration(self._server, control, self.weights, on_tokens=on_tokens, salvages=False)
        self._generation.model = states.of(index).model
        self.num_running = 0
        """Requests under way."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session_id: str
    ) -> Completion:
        """Continue `token_ids` ([T]) with proven weights. Raises EngineError; EngineGone where it is out."""
        self.num_running += 1
        try:
            number = 0
            while True:
                refused = self.weights.state.num_refused
                completion = await self._generation.generate(
                    token_ids, sampling, request_id=_name(request_id, number), session_id=session_id
                )
                if await self.weights.accepted(completion, refused):
                    return completion
                number += 1
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        """Close its connections."""
        await self._server.close()


class FollowedEngines:
    """Those for one purpose as one Engine: an episode stays where its prefix is, a new one goes to the least busy.

    Args:
        states: what the orchestrator says of all engines; they are known before the first request.
        report: asks the orchestrator to look at an engine.
        is_spare: use the engines that only evaluate, and no others.
        return_timeout_s: how long a request waits for an engine when none serves.
        on_tokens: called whenever tokens of any answer arrive.

    Example:
        async with FollowedEngines(states, link.engine_failed, request_timeout_s=120) as engines:
            await engines.named("3fa4").generate(prompt_ids, sampling, request_id="r1", session_id="episode 1")
    """

    def __init__(
        self,
        states: EngineStates,
        report: ReportFailure,
        *,
        request_timeout_s: float,
        is_spare: bool = False,
        return_timeout_s: float = 180.0,
        token: str | None = None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._states = states
        self._report = report
        self._is_spare = is_spare
        self._request_timeout_s = request_timeout_s
        self._return_timeout_s = return_timeout_s
        self._token = token
        self._on_tokens = on_tokens
        self._engines: dict[int, FollowedEngine] = {}
        self._left: list[FollowedEngine] = []  # of URLs that are used no more, with requests that may still run
        self._index_of: OrderedDict[str, int] = OrderedDict()
        self.num_tokens = 0
        """Tokens generated so far."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in (*self._engines.values(), *self._left):
            await engine.close()

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return sum(engine.num_running for engine in (*self._engines.values(), *self._left))

    def named(self, name: str) -> Engine:
        """An engine whose request ids end with `name`, which has no `-`: ids of two clients never collide."""
        return _NamedEngine(self, name)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids` ([T]) on the engine that has the session's prefix, or on another if that is out.

        Raises EngineError when an engine that serves refuses the request or cannot be reached from here, or when no
        engine serves in time.
        """
        session_id, number = session_id or request_id, 0
        while True:
            index = await self._index_for(session_id)
            engine = self._engine(index)
            try:
                completion = await engine.generate(token_ids, sampling, _name(request_id, number), session_id)
            except EngineGone as error:
                if engine.weights.state.is_serving and engine.weights.state.url == engine.url:
                    raise EngineError(f"{error}; the orchestrator reaches it, this worker does not") from error
                number += 1
                continue
            self.num_tokens += len(completion.token_ids)
            return completion

    async def _index_for(self, session_id: str) -> int:
        index = self._index_of.get(session_id)
        if index is None or not self._states.of(index).is_serving:
            index = min(await self._serving(), key=lambda index: self._engine(index).num_running)
        self._index_of[session_id] = index
        self._index_of.move_to_end(session_id)
        if len(self._index_of) > MAX_SESSIONS:
            self._index_of.popitem(last=False)
        return index

    async def _serving(self) -> list[int]:
        """The engines that serve, as soon as one does. Raises EngineError past the deadline."""

        def ours() -> list[int]:
            return [index for index in range(len(self._states)) if self._states.of(index).is_spare == self._is_spare]

        def serving() -> list[int]:
            return [index for index in ours() if self._states.of(index).is_serving]

        try:
            async with asyncio.timeout(self._return_timeout_s):
                await self._states.until(lambda: bool(serving()))
        except TimeoutError:
            raise EngineError(f"none of {len(ours())} engines came back within {self._return_timeout_s:g} s") from None
        return serving()

    def _engine(self, index: int) -> FollowedEngine:
        engine = self._engines.get(index)
        if engine is None or engine.url != self._states.of(index).url:
            self._left += [] if engine is None else [engine]
            engine = self._engines[index] = FollowedEngine(
                index,
                self._states,
                self._report,
                timeout_s=self._request_timeout_s,
                token=self._token,
                on_tokens=self._on_tokens,
            )
        return engine


class _NamedEngine:
    """See FollowedEngines.named."""

    def __init__(self, engines: FollowedEngines, name: str) -> None:
        self._engines = engines
        self._name = name

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """See FollowedEngines.generate."""
        request_id = f"{request_id}@{self._name}"
        return await self._engines.generate(token_ids, sampling, request_id=request_id, session_id=session_id)


def _name(request_id: str, number: int) -> str:
    """The id of a request's `number`-th repetition."""
    return f"{request_id}.{number}" if number else request_id
