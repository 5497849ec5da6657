"""An engine with measurements: tokens, busy seconds, and its waits in the wait graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentrl.engine.base import Receivers, TrainableEngine, WeightUpdate
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.types import Completion, Sampling, TransferInit, WeightsRef


class BusyClock:
    """Counts the seconds during which at least one piece of work was running.

    >>> times = iter([1.0, 4.0])
    >>> clock = BusyClock(lambda: next(times))
    >>> clock.start()
    >>> clock.stop()
    >>> clock.seconds
    3.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running = 0
        self._is_held = False
        self._since: float | None = None  # when the current period began
        self._total_s = 0.0

    def start(self) -> None:
        """One more piece of work begins."""
        self._num_running += 1
        self._note()

    def stop(self) -> None:
        """One piece of work ends."""
        self._num_running -= 1
        self._note()

    def hold(self, is_held: bool) -> None:
        """Whether all work stands still from now on: such time is not busy."""
        self._is_held = is_held
        self._note()

    @property
    def seconds(self) -> float:
        """Busy time so far, the current period included."""
        return self._total_s + (0.0 if self._since is None else self._clock() - self._since)

    def _note(self) -> None:
        is_busy = self._num_running > 0 and not self._is_held
        if is_busy and self._since is None:
            self._since = self._clock()
        elif not is_busy and self._since is not None:
            self._total_s += self._clock() - self._since
            self._since = None


class MeteredEngine:
    """An engine that counts its tokens and its busy seconds, and notes every call in `wait_graph`.

    Time in which it is paused or asleep until its new weights does not count as busy.

    Example:
        engine = MeteredEngine(VLLMEngine(url))
        await engine.generate(prompt_ids, sampling, request_id="r1")
        engine.num_tokens, engine.busy.seconds
    """

    def __init__(self, engine: TrainableEngine, wait_graph: WaitGraph | None = None) -> None:
        self._engine = engine
        self.wait_graph = wait_graph or WaitGraph()
        """Records every call as a wait."""
        url = getattr(engine, "url", "")  # one that runs in this process has none
        self.name = f"engine at {url}" if url else "engine"
        """Its name in the wait graph."""
        self.busy = BusyClock()
        self.num_tokens = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """See Engine.generate."""
        self.busy.start()
        try:
            with self.wait_graph.waiting("episodes", on=self.name, what="generate"):
                completion = await self._engine.generate(
                    token_ids, sampling, request_id=request_id, session_id=session_id
                )
        finally:
            self.busy.stop()
        self.num_tokens += len(completion.token_ids)
        return completion

    @property
    def wants_weights(self) -> bool:
        """See TrainableEngine.wants_weights."""
        return self._engine.wants_weights

    async def receivers(self, policy_version: int) -> Receivers:
        """See TrainableEngine.receivers."""
        with self.wait_graph.waiting("learner", on=self.name, what="running engines"):
            return await self._engine.receivers(policy_version)

    async def init_transfer(self, init: TransferInit) -> None:
        """See TrainableEngine.init_transfer."""
        with self.wait_graph.waiting("learner", on=self.name, what="joining its group"):
            await self._engine.init_transfer(init)

    async def pause(self) -> None:
        """See TrainableEngine.pause."""
        with self.wait_graph.waiting("training loop", on=self.name, what="pausing"):
            await self._engine.pause()
        self.busy.hold(True)

    async def sleep(self) -> None:
        """See TrainableEngine.sleep."""
        with self.wait_graph.waiting("training loop", on=self.name, what="releasing its memory"):
            await self._engine.sleep()
        self.busy.hold(True)

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """See TrainableEngine.update_weights."""
        with self.wait_graph.waiting("learner", on=self.name, what="taking new weights"):
            update = await self._engine.update_weights(ref)
        self.busy.hold(False)
        return update

    def metrics(self) -> dict[str, float]:
        """See TrainableEngine.metrics."""
        return self._engine.metrics()
