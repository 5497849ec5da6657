"""Several engines as one: an episode stays where its prefix is cached, new episodes go to the least busy engine.

An engine that fails leaves the pool at once, its requests move to another, and it returns only with the current
weights, proven. So two versions never serve side by side unnoticed: an update commits on every engine that serves.
Independent of HTTP and of processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from agentrl.config.engine import UpdateOrder
from agentrl.engine.base import EngineState, Receivers, WeightUpdate, is_delta
from agentrl.engine.pooled_engine import PooledEngine, Replica
from agentrl.engine.transfer_group import Failure, TransferGroup
from agentrl.errors import EngineError, EngineGone, WeightsWanted, WeightSyncError
from agentrl.supervision.backoff import backoff_s
from agentrl.types import Completion, Sampling, TransferInit, WeightsRef

log = logging.getLogger(__name__)

MAX_SESSIONS = 100_000
MAX_FAILURES = 3
"""Failures in a row after which an engine is taken out even if it answers."""
FIRST_RETURN_S, LAST_RETURN_S = 0.5, 5.0
"""Pauses between two looks at an engine that is out, the first and the longest."""


class EnginePool:
    """A TrainableEngine made of several, which it enters and leaves as async context managers.

    Args:
        engines: at least one; all serve the same model.
        order: whether an update reaches all engines at once, or one after the other while the rest generate.
        return_timeout_s: how long a request waits for an engine when none serves.

    Raises on entering: EngineError when one of them cannot be used.

    Example:
        async with EnginePool([VLLMEngine(url) for url in urls], order="rolling") as engine:
            await engine.generate(prompt_ids, sampling, request_id="r1", session_id="episode 1")
    """

    def __init__(
        self, engines: Sequence[Replica], *, order: UpdateOrder = "simultaneous", return_timeout_s: float = 180.0
    ) -> None:
        self._engines = [PooledEngine(client=engine) for engine in engines]
        self._order = order
        self._return_timeout_s = return_timeout_s
        self._engine_of: OrderedDict[str, PooledEngine] = OrderedDict()
        self._changed = asyncio.Condition()
        self._updating = asyncio.Lock()  # one update, or one return, at a time
        self._awake = asyncio.Event()  # cleared between `sleep` and the next update: no engine returns
        self._awake.set()
        self._ref: WeightsRef | None = None
        self._stack = AsyncExitStack()
        self._returns: set[asyncio.Task[None]] = set()
        self._num_ejections = 0
        self._num_moved = 0
        self._last_error: Failure | None = None
        self._group = TransferGroup(self._engines, leave=self._eject, return_timeout_s=return_timeout_s)

    async def __aenter__(self) -> Self:
        try:
            for member in self._engines:
                await self._stack.enter_async_context(member.client)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._returns:
            task.cancel()
        await asyncio.gather(*self._returns, return_exceptions=True)
        await self._group.close()
        await self._stack.aclose()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str | None = None
    ) -> Completion:
        """Continue `token_ids` ([T]) on the engine that has the session's prefix.

        A request whose engine goes away is sent to another one. Raises EngineError when an engine that runs refuses the
        request, or when no engine returned in time.
        """
        while True:
            member = await self._engine_for(session_id)
            member.num_running += 1
            try:
                completion = await member.client.generate(
                    token_ids, sampling, request_id=request_id, session_id=session_id
                )
            except EngineError as error:
                if not await self._is_engines_fault(member, error):
                    raise
                await self._eject(member, error)
                self._num_moved += 1
                continue
            finally:
                member.num_running -= 1
            member.failures = 0
            return completion

    @property
    def url(self) -> str:
        """The URLs of all engines, for messages."""
        return ", ".join(member.client.url for member in self._engines)

    @property
    def wants_weights(self) -> bool:
        """Whether the learner must publish the current weights again.

        It streams them, and an engine that runs, or was promised to it, does not have them; or it published what
        changed, and other weights came of it in an engine.
        """
        ref = self._ref
        if ref is not None and is_delta(ref):
            return self._needs_all is not None
        if ref is None or not self._group.is_used:
            return False
        return self._group.is_awaited or any(
            (member.is_serving or member.is_back) and not member.has(ref.policy_version)
            for member in self._engines
            if not member.is_lost and not member.is_taking
        )

    async def receivers(self, policy_version: int) -> Receivers:
        """See TransferGroup.receivers."""
        return await self._group.receivers(policy_version)

    async def init_transfer(self, init: TransferInit) -> None:
        """Let the engines of the last `receivers` join the learner's group. Raises WeightsWanted when one cannot."""
        await self._group.join(init)

    async def pause(self) -> None:
        """Stop every engine that serves at its next token; one that cannot leaves the pool.

        Raises EngineError when none stopped.
        """
        async with self._updating:
            await self._stopped(lambda client: client.pause())

    async def sleep(self) -> None:
        """Release the GPU memory of every engine that serves; one that cannot leaves the pool.

        Raises EngineError when none released it.
        """
        async with self._updating:
            self._awake.clear()
            await self._stopped(lambda client: client.sleep())

    async def update_weights(self, ref: WeightsRef) -> WeightUpdate:
        """Swap weights in every engine that serves; one that cannot leaves, and takes them when it returns.

        Returns the longest gap and the worst parity. Raises WeightSyncError when no engine took them, WeightsWanted
        when the learner's group broke, or when one engine needs all weights and `ref` has what changed.
        """
        async with self._updating:
            self._check_changes(ref)
            self._ref = ref
            self._awake.set()
            if ref.path is None:
                try:
                    return _worst(await self._group.update(ref))
                finally:
                    await self._notify()
            serving = [member for member in self._engines if member.is_serving]
            if self._order == "rolling":
                outcomes = [await self._updated(member, ref) for member in serving]
            else:
                outcomes = list(await asyncio.gather(*(self._updated(member, ref) for member in serving)))
        self._check_changes(ref)
        updates = [outcome for outcome in outcomes if isinstance(outcome, WeightUpdate)]
        if updates:
            return _worst(updates)
        errors = [outcome for outcome in outcomes if not isinstance(outcome, WeightUpdate)]
        return await self._first_return(ref, errors[0] if errors else None)

    def states(self) -> tuple[EngineState, ...]:
        """See SharedEngines.states."""
        return tuple(
            replace(state, is_serving=state.is_serving and member.takes_requests)
            for member in self._engines
            for state in member.client.states()
        )

    async def check(self, index: int) -> None:
        """See SharedEngines.check."""
        member = self._engines[index]
        if member.is_serving:
            try:
                await member.client.recover()
            except EngineError as error:
                await self._eject(member, error)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, over all engines."""
        totals: dict[str, float] = {}
        for member in self._engines:
            for name, value in member.client.metrics().items():
                totals[name] = totals.get(name, 0.0) + value
        return totals | {
            "engine/num_serving": float(sum(member.is_serving for member in self._engines)),
            "engine/ejections": float(self._num_ejections),
            "engine/moved_requests": float(self._num_moved),
        }

    @property
    def _needs_all(self) -> PooledEngine | None:
        """An engine in which other weights came of the changes. One that died takes them anew when it returns."""
        wanting = (one for one in self._engines if one.client.wants_weights and not one.is_lost and not one.is_gone)
        return next(wanting, None)

    def _check_changes(self, ref: WeightsRef) -> None:
        """Raises WeightsWanted for changes that an engine could not use: the learner publishes all weights then."""
        if is_delta(ref) and (member := self._needs_all) is not None:
            raise WeightsWanted(f"version {ref.policy_version}: the engine at {member.client.url} needs all weights")

    async def _engine_for(self, session: str | None) -> PooledEngine:
        """Where the session is, or the engine with the least to do. Waits while there is none."""
        member = None if session is None else self._engine_of.get(session)
        if member is None or not member.takes_requests:
            await self._someone_serves()
            member = min(
                (member for member in self._engines if member.takes_requests), key=lambda member: member.num_running
            )
        if session is None:
            return member
        self._engine_of[session] = member
        self._engine_of.move_to_end(session)
        if len(self._engine_of) > MAX_SESSIONS:
            self._engine_of.popitem(last=False)
        return member

    async def _someone_serves(self) -> None:
        """Wait until an engine serves. Raises EngineError past `return_timeout_s`, or when all are given up."""
        try:
            await self._changed_to_serving()
        except TimeoutError:
            raise EngineError(
                f"none of {len(self._engines)} engines came back within {self._return_timeout_s:g} s: "
                f"{self._last_error}"
            ) from self._last_error
        if all(member.is_lost for member in self._engines):
            raise WeightSyncError(f"no engine is left: {self._last_error}") from self._last_error

    async def _changed_to_serving(self) -> None:
        """Wait until an engine serves, or all are given up. Raises TimeoutError past `return_timeout_s`."""
        while True:
            try:
                async with asyncio.timeout(self._return_timeout_s), self._changed:
                    await self._changed.wait_for(
                        lambda: (
                            any(member.takes_requests for member in self._engines)
                            or all(member.is_lost for member in self._engines)
                        )
                    )
                    return
            except TimeoutError:
                if not self.wants_weights:  # the learner that they wait for has deadlines of its own
                    raise

    async def _is_engines_fault(self, member: PooledEngine, error: EngineError) -> bool:
        """Whether another engine may succeed; otherwise the request itself is wrong."""
        member.failures += 1
        if isinstance(error, EngineGone | WeightSyncError) or not member.is_serving or member.failures >= MAX_FAILURES:
            return True
        try:
            await member.client.health()
        except EngineError:
            return True
        return False

    async def _eject(self, member: PooledEngine, error: Failure) -> None:
        self._last_error = error
        member.num_exits += 1
        if not member.is_serving:
            return
        member.is_serving = False
        self._num_ejections += 1
        log.warning("the engine at %s left the pool: %s", member.client.url, error)
        task = asyncio.create_task(self._bring_back(member), name=f"return of {member.client.url}")
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _bring_back(self, member: PooledEngine) -> None:
        """Try until it serves the current weights again, or has failed to take them too often."""
        began, number = time.monotonic(), 0
        while not member.is_lost:
            await asyncio.sleep(backoff_s(number, base_s=FIRST_RETURN_S, max_s=LAST_RETURN_S))
            number += 1
            try:
                await self._answered(member)
                if not self._group.is_used or self._ref is None:
                    await self._renewed(member)
                elif not member.is_serving:
                    member.is_back, number = True, 0  # the learner gives it the weights
            except WeightSyncError as error:
                member.false_updates += 1
                self._last_error = error
                log.warning("%s", error)
            except (EngineError, WeightsWanted) as error:
                member.is_back = False
                self._last_error = error
            if member.is_serving:
                log.warning("the engine at %s serves again, after %.1f s", member.client.url, time.monotonic() - began)
                break
        else:
            log.error("the engine at %s is given up: %s", member.client.url, self._last_error)
        await self._notify()

    async def _answered(self, member: PooledEngine) -> None:
        try:
            await member.client.health()
        except EngineError:
            member.is_gone = True
            raise

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _stopped(self, stop: Callable[[Replica], Awaitable[None]]) -> None:
        async def stopped(member: PooledEngine) -> EngineError | None:
            try:
                await stop(member.client)
            except EngineError as error:
                await self._eject(member, error)
                return error
            return None

        serving = [member for member in self._engines if member.is_serving]
        errors = [error for error in await asyncio.gather(*map(stopped, serving)) if error is not None]
        if errors and len(errors) == len(serving):
            raise errors[0]

    async def _renewed(self, member: PooledEngine) -> None:
        await self._awake.wait()
        async with self._updating:
            try:
                await (member.client.recover() if self._ref is None else member.client.update_weights(self._ref))
            finally:
                member.is_gone = False
            member.failures = member.false_updates = 0
            member.is_serving = True

    async def _updated(self, member: PooledEngine, ref: WeightsRef) -> WeightUpdate | Failure:
        try:
            return await member.client.update_weights(ref)
        except (EngineError, WeightsWanted) as error:
            member.false_updates += 1
            await self._eject(member, error)
            return error

    async def _first_return(self, ref: WeightsRef, error: Failure | None) -> WeightUpdate:
        """The result of an update that no engine took at once: engines take it when they return."""
        began = time.monotonic()
        try:
            await self._someone_serves()
        except EngineError as gone:
            raise WeightSyncError(f"no engine took version {ref.policy_version}: {error or gone}") from gone
        return WeightUpdate(gap_s=max(time.monotonic() - began, 1e-9), num_bytes=ref.num_bytes, parity=None)


def _worst(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    probed = [update.parity for update in updates if update.parity is not None]
    return WeightUpdate(
        gap_s=max(update.gap_s for update in updates),
        num_bytes=updates[0].num_bytes,
        parity=max(probed, key=lambda parity: parity.max_abs) if probed else None,
    )
