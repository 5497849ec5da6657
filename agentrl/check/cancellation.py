"""Cancels an episode at each of its awaits in turn, and checks that it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.env.base import Env
from agentrl.env.driver import play_script
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

MAX_POINTS = 32
"""Awaits at which an episode is cancelled: all of them, or this many spread evenly."""
LEFT_OPEN_S = 5.0
"""Deadline for the sandbox to have its sessions back."""
NUM_LOOKS = 10


@dataclass(kw_only=True)
class _Suspensions:
    """Awaits `work`, counts how often it yields to the event loop, and calls `on_reach` at yield number `reach`."""

    work: Coroutine[Any, Any, Any]
    reach: int = 0
    on_reach: Callable[[], object] = lambda: None
    count: int = field(default=0, init=False)

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.work.__await__()
        resume: Callable[[], Any] = lambda: next(steps)  # noqa: E731  (replaced in the loop)
        while True:
            try:
                waited_for = resume()
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self.reach:
                asyncio.get_running_loop().call_soon(self.on_reach)
            try:
                value = yield waited_for
            except BaseException as error:
                resume = _thrower(steps, error)
            else:
                resume = _sender(steps, value)


def _sender(steps: Generator[Any, Any, Any], value: Any) -> Callable[[], Any]:
    return lambda: steps.send(value)


def _thrower(steps: Generator[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: steps.throw(error)


async def find_unclosed(
    make_env: Callable[[], Env],
    task: Task,
    script: Sequence[Message],
    *,
    sandbox: SandboxClient | None,
    limit_s: float,
) -> tuple[int, str | None]:
    """(number of cancellations, the first problem found or None). Raises what the uncancelled episode raises."""
    before = None if sandbox is None else (await sandbox.health()).sessions
    num_awaits = await _count_awaits(make_env(), task, script, limit_s)
    stride = max(1, -(-num_awaits // MAX_POINTS))
    points = range(1, num_awaits + 1, stride)
    for point in points:
        problem = await _cancelled_at(make_env(), task, script, point, limit_s)
        if problem is not None:
            return len(points), f"{problem} (cancelled at await {point} of {num_awaits})"
    if sandbox is not None and before is not None and (left := await _left_open(sandbox, before)):
        return len(points), f"{left} sandbox sessions are left open by cancelled episodes"
    return len(points), None


async def _count_awaits(env: Env, task: Task, script: Sequence[Message], limit_s: float) -> int:
    inside = _Inside(env)
    async with asyncio.timeout(limit_s):
        await play_script(inside.env, task, script, seed=0)
    return inside.num_awaits


async def _cancelled_at(env: Env, task: Task, script: Sequence[Message], point: int, limit_s: float) -> str | None:
    inside = _Inside(env, reach=point)
    episode = asyncio.create_task(play_script(inside.env, task, script, seed=0))
    inside.on_reach = episode.cancel
    _, hanging = await asyncio.wait({episode}, timeout=limit_s)
    if hanging:
        return f"a cancelled episode did not end within {limit_s:.0f} s"
    if not inside.was_closed:
        return "close() did not finish after a cancellation"
    error = None if episode.cancelled() else episode.exception()
    if error is not None:
        return f"a cancellation came out as {type(error).__name__}: {error}"
    if not episode.cancelled() and inside.num_awaits >= point:
        return "the environment swallowed the cancellation"
    return None


class _Inside:
    """An environment whose methods are instrumented: counts their awaits, and records whether `close` finished."""

    def __init__(self, env: Env, *, reach: int = 0) -> None:
        self.env = env
        self.num_awaits = 0
        self.was_closed = False
        self.on_reach: Callable[[], object] = lambda: None
        self._reach = reach
        for name in ("reset", "step", "score", "close"):
            vars(env)[name] = self._watched(name, getattr(env, name))

    def _watched(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            async def work() -> Any:
                await asyncio.sleep(0)  # so that there is an await to cancel at, whatever the method does
                return await method(*args, **kwargs)

            watch = _Suspensions(work=work(), reach=self._reach - self.num_awaits)
            # During `close` the cancellation comes from outside, as in a run: the driver protects `close` from it.
            inside = asyncio.current_task()
            watch.on_reach = self.on_reach if name == "close" or inside is None else inside.cancel
            try:
                result = await watch
            finally:
                self.num_awaits += watch.count
            self.was_closed = self.was_closed or name == "close"
            return result

        return call


async def _left_open(sandbox: SandboxClient, before: int) -> int:
    """Sessions beyond `before` that are still open after LEFT_OPEN_S."""
    for _ in range(NUM_LOOKS):
        left = (await sandbox.health()).sessions - before
        if left <= 0:
            return 0
        await asyncio.sleep(LEFT_OPEN_S / NUM_LOOKS)
    return left
