"""Weights streamed to the engines of a pool: all that need a version take it from the learner in one group.

A group is made for the engines that run at that moment. When one of them fails, the group is broken for all: the
learner is told to publish again, and the next group is made without that engine. When it returns, it gets the current
version in a group of its own, while the others go on. Independent of routing and HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentrl.engine.base import Receivers, WeightUpdate
from agentrl.engine.pooled_engine import PooledEngine
from agentrl.errors import AgentRLError, EngineError, EngineGone, PreviousWeightsKept, WeightsWanted, WeightSyncError
from agentrl.types import TransferInit, WeightsRef

POLL_S = 0.5
SETTLE_S = 10.0
"""How long a publication waits for engines that an update which failed has left busy, before it goes on without them.
"""

Failure = EngineError | WeightsWanted


class TransferGroup:
    """The engines of a pool that are joined to the learner, or about to be.

    Args:
        leave: takes an engine out of the pool.
        return_timeout_s: how long a publication waits for an engine when none runs.

    Example:
        await group.receivers(5)  # who will take version 5
        await group.join(init)  # they join the learner's group
        updates = await group.update(ref)
    """

    def __init__(
        self,
        engines: Sequence[PooledEngine],
        *,
        leave: Callable[[PooledEngine, Failure], Awaitable[None]],
        return_timeout_s: float,
    ) -> None:
        self._engines = engines
        self._leave = leave
        self._return_timeout_s = return_timeout_s
        self._members: list[PooledEngine] = []
        self._updates: set[asyncio.Task[None]] = set()
        self.is_used = False
        """Whether the learner streams its weights: then an engine that returns waits for it."""

    @property
    def is_awaited(self) -> bool:
        """Whether engines of the last `receivers` have not been given anything yet."""
        return bool(self._members)

    async def receivers(self, version: int) -> Receivers:
        """The engines that run and do not have `version`; none if all that run have it.

        Those that an update which failed has left busy are left out if they do not end it soon: one may hang. Raises
        EngineError when no engine runs in time, WeightSyncError when all are given up.
        """
        self.is_used = True
        deadline_s = time.monotonic() + self._return_timeout_s
        await self._settled(SETTLE_S)
        for engine in self._engines:
            if engine.is_taking and engine.is_serving:
                await self._leave(engine, EngineError(f"the update of {engine.client.url} has not ended"))
        while True:
            wanting = [engine for engine in self._engines if not engine.has(version) and not engine.is_lost]
            lacking = [engine for engine in wanting if not engine.is_taking]
            errors = await asyncio.gather(*map(_why_out, lacking))
            self._members = [engine for engine, error in zip(lacking, errors, strict=True) if error is None]
            if self._members or any(engine.has(version) for engine in self._engines):
                break
            if not wanting:
                raise WeightSyncError(f"no engine is left to take version {version}")
            if time.monotonic() > deadline_s:
                why = errors[0] if errors else "an update has not ended"
                raise EngineError(f"no engine came back within {self._return_timeout_s:g} s: {why}")
            await asyncio.sleep(POLL_S)
        return Receivers(engines=tuple(f"{engine.client.url}#{engine.num_exits}" for engine in self._members))

    async def join(self, init: TransferInit) -> None:
        """Let all of the last `receivers` join the learner's group at once. Raises WeightsWanted when one cannot."""
        if not self._members:
            raise WeightsWanted("no engine waits for a group")
        number = len(self._members)
        joining = [
            asyncio.create_task(self._joined(engine, TransferInit(init_info=share_of(init.init_info, index, number))))
            for index, engine in enumerate(self._members)
        ]
        try:
            # At the first failure: the learner ends the waiting of the others.
            await asyncio.gather(*joining)
        finally:
            for task in joining:
                task.cancel()
            await asyncio.wait(joining)

    async def update(self, ref: WeightsRef) -> list[WeightUpdate]:
        """Give all members `ref`. Returns the last updates of the engines that have this version.

        Raises WeightsWanted as soon as one fails: the others may wait in a broadcast that never ends, until the
        learner, which this answer reaches, ends it. Also when an engine has other weights of this version, from a
        learner that was restarted since: then it takes the next ones too.
        """
        members, self._members = self._members, []
        self._check_those_that_have(ref)
        if any(engine.is_taking or not (engine.is_serving or engine.is_back) for engine in members):
            raise WeightsWanted(f"version {ref.policy_version}: an engine of the group has left")
        updates = {asyncio.create_task(self._updated(engine, ref)) for engine in members}
        self._updates |= updates
        if updates:
            done, _ = await asyncio.wait(updates, return_when=asyncio.FIRST_EXCEPTION)
            self._updates -= done
            errors = [error for task in done if (error := task.exception()) is not None]
            if any(not isinstance(error, AgentRLError) for error in errors):
                raise errors[0]
            if all(engine.is_lost for engine in self._engines):
                raise WeightSyncError(f"no engine took version {ref.policy_version}: {errors[0]}") from errors[0]
            if len(done) < len(updates) or len(errors) == len(updates):
                raise WeightsWanted(f"version {ref.policy_version}: {errors[0]}") from errors[0]
        taken = [engine.update for engine in self._engines if engine.has(ref.policy_version) and engine.update]
        if not taken:
            raise WeightsWanted(f"version {ref.policy_version}: the engines that had it have left")
        return taken

    def _check_those_that_have(self, ref: WeightsRef) -> None:
        false = [one for one in self._engines if one.has(ref.policy_version) and one.checksum != ref.checksum]
        for engine in false:
            engine.version = None
        if false:
            urls = ", ".join(engine.client.url for engine in false)
            raise WeightsWanted(f"version {ref.policy_version}: {urls} has other weights of this version")

    async def close(self) -> None:
        """End the updates that still run."""
        for task in self._updates:
            task.cancel()
        await asyncio.gather(*self._updates, return_exceptions=True)

    async def _settled(self, timeout_s: float) -> None:
        if self._updates:
            done, self._updates = await asyncio.wait(self._updates, timeout=timeout_s)
            for task in done:
                task.exception()  # it has been dealt with; a task must be asked

    async def _joined(self, engine: PooledEngine, init: TransferInit) -> None:
        try:
            await engine.client.init_transfer(init)
        except (EngineError, WeightsWanted) as error:
            await self._failed(engine, error)
            raise WeightsWanted(f"the engine at {engine.client.url} did not join: {error}") from error

    async def _updated(self, engine: PooledEngine, ref: WeightsRef) -> None:
        engine.is_taking = True
        try:
            engine.update = await engine.client.update_weights(ref)
        except PreviousWeightsKept as error:
            engine.false_updates += 1
            if engine.is_lost:
                await self._leave(engine, error)
            raise  # otherwise it continues to serve
        except (EngineError, WeightsWanted) as error:
            await self._failed(engine, error)
            raise
        finally:
            engine.is_taking = False
        engine.version, engine.checksum = ref.policy_version, ref.checksum
        engine.is_serving, engine.is_back = True, False
        engine.failures = engine.false_updates = 0

    async def _failed(self, engine: PooledEngine, error: Failure) -> None:
        if not isinstance(error, EngineGone | WeightsWanted):
            engine.false_updates += 1
        await self._leave(engine, error)


async def _why_out(engine: PooledEngine) -> EngineError | None:
    """Why it does not run, or None."""
    try:
        await engine.client.health()
    except EngineError as error:
        engine.is_back = False
        return error
    engine.is_back = not engine.is_serving
    return None


def share_of(init_info: dict[str, Any], index: int, number: int) -> dict[str, Any]:
    """What the `index`-th of `number` engines is sent: the ranks of its workers follow those of the engines before it.

    >>> share_of({"rank_offset": 1, "world_size": 7}, 1, 3)  # three engines of two workers
    {'rank_offset': 3, 'world_size': 7}
    """
    if "rank_offset" not in init_info:
        return init_info
    workers = (init_info["world_size"] - init_info["rank_offset"]) // number
    return {**init_info, "rank_offset": init_info["rank_offset"] + index * workers}
