"""What tenants share: slots in turn, and numbers of which each has a part of its own. Independent of what is shared."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator


class FairSlots:
    """A semaphore whose waiting tenants get free slots in turn, each its own calls in the order of their arrival.

    Example:
        slots = FairSlots(8)
        async with slots.of("tenant"):
            ...
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, tenant: str) -> None:
        if self._num_free:  # then nobody waits
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()  # it was its turn at the same moment
            elif turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[tenant]
            raise

    def _give_back(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # last
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class Shares:
    """Counts what each tenant has of a limited number. Half of it is divided among tenants, half is for any of them.

    >>> shares = Shares(8, num_tenants=2)
    >>> sum(shares.add("greedy") for _ in range(100)), sum(shares.add("late") for _ in range(100))
    (6, 2)
    """

    def __init__(self, limit: int, *, num_tenants: int) -> None:
        self._own = limit // (2 * num_tenants)
        self._common = limit - num_tenants * self._own
        self._counts: Counter[str] = Counter()

    def has_room(self, tenant: str) -> bool:
        """Whether the tenant may have one more."""
        used = sum(max(count - self._own, 0) for count in self._counts.values())
        return self._counts[tenant] < self._own or used < self._common

    def add(self, tenant: str) -> bool:
        """Take one. False when the tenant has its share and nothing is left for any."""
        if has_room := self.has_room(tenant):
            self._counts[tenant] += 1
        return has_room

    def remove(self, tenant: str) -> None:
        """Give one back."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
