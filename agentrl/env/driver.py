"""Drives one episode: start, turns, score, close. Every failure is attributed once, every environment is closed.

Independent of tokens, engines and HTTP: a Speaker says the assistant's turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeVar

from agentrl.env.attribution import attributed
from agentrl.env.base import Action, Env, Episode, Scope, StepResult
from agentrl.env.returned import checked_opening, checked_step
from agentrl.env.scoring import scored
from agentrl.types import FinishReason, Message, StopReason, Task

log = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0


class Speaker(Protocol):
    """Says the assistant's turns of one episode: a model, a script or a person.

    class Parrot:
        async def speak(self, turn, *, is_last):
            return Action(message=Message(role="assistant", content=self.last))

        def observe(self, result):
            self.last = result.observation[-1].content
            return result.observation
    """

    async def speak(self, turn: int, *, is_last: bool) -> Action | None:
        """Turn number `turn`, from 0; None when there is no room left for one. `is_last`: no further turn follows."""
        ...

    def observe(self, result: StepResult) -> Sequence[Message]:
        """Receive the environment's answer; returns its messages as the speaker is shown them."""
        ...


@dataclass(kw_only=True)
class Dialogue:
    """One episode under way: the turns of a speaker and the answers of an environment.

    dialogue = Dialogue(env=env, task=task)
    await dialogue.begin(seed=0)
    stop_reason = await dialogue.play(speaker, max_turns=8)
    episode = await scored(env, dialogue.episode(stop_reason))
    """

    env: Env
    task: Task
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    step_rewards: list[float] = field(default_factory=list)
    """What `step` returned for each turn; 0 for a turn that it did not see."""
    counts: dict[str, float] = field(default_factory=dict)
    """Sums of the numbers in the steps' infos."""

    async def begin(self, seed: int | None) -> None:
        """Reset the environment. Raises EnvError, SandboxError."""
        self.messages = list(await start(self.env, self.task, seed))

    async def play(self, speaker: Speaker, *, max_turns: int) -> StopReason:
        """Take turns until something ends the episode. Raises InfraError when a part fails."""
        for turn in range(max_turns):
            action = await speaker.speak(turn, is_last=turn == max_turns - 1)
            if action is None:
                return StopReason.MAX_CONTEXT
            self.num_turns += 1
            self.step_rewards.append(0.0)
            self.messages.append(action.message)
            if action.finish_reason is FinishReason.LENGTH:
                return action.cut_by
            result = await advance(self.env, action)
            add_counts(self.counts, result.info)
            self.step_rewards[-1] = result.reward
            self.messages.extend(speaker.observe(result))
            if result.terminated or result.truncated:
                return StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
        return StopReason.MAX_TURNS

    def episode(self, stop_reason: StopReason) -> Episode:
        """The finished conversation, not yet scored."""
        return Episode(
            task=self.task,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            step_reward=sum(self.step_rewards),
            info=self.counts,
        )


@dataclass(frozen=True, slots=True)
class _Script:
    """A Speaker that says prepared messages."""

    messages: Sequence[Message]

    async def speak(self, turn: int, *, is_last: bool) -> Action | None:
        return Action(message=self.messages[turn])

    def observe(self, result: StepResult) -> Sequence[Message]:
        return result.observation


async def play_script(env: Env, task: Task, messages: Sequence[Message], seed: int = 0) -> Episode:
    """Drive `env` with scripted assistant messages, score it, and close it, whatever happens.

    Returns the scored Episode: COMPLETED when the environment terminated, TRUNCATED when it truncated, MAX_TURNS when
    the script or the turn budget ran out first. Raises InfraError exactly as a rollout does.
    """
    return await uninterrupted_close(_play_script(env, task, messages, seed))


async def _play_script(env: Env, task: Task, messages: Sequence[Message], seed: int) -> Episode:
    dialogue = Dialogue(env=env, task=task)
    try:
        await dialogue.begin(seed)
        stop_reason = await dialogue.play(_Script(messages), max_turns=min(env.max_turns, len(messages)))
        return await scored(env, dialogue.episode(stop_reason))
    finally:
        await close(env)


async def start(env: Env, task: Task, seed: int | None) -> list[Message]:
    """Call `reset` and attribute its failures. Raises EnvError, SandboxError."""
    env.unwrapped._scope = Scope(task=task, seed=seed)
    inner = type(env.unwrapped)
    with attributed(f"{inner.__name__}.reset of task {task.id}", method="reset", at=inner.reset):
        returned = await env.reset(task=task, seed=seed)
    return checked_opening(env, returned, task)


async def advance(env: Env, action: Action) -> StepResult:
    """Call `step`, attribute its failures and check its result. Raises EnvError, SandboxError."""
    inner = type(env.unwrapped)
    with attributed(f"{inner.__name__}.step", method="step", at=inner.step):
        returned = await env.step(action)
    return checked_step(env, returned)


@dataclass(kw_only=True)
class _Closing:
    """Whether an episode's task is closing its environment now, and whether it was cancelled meanwhile."""

    is_active: bool = False
    is_cancelled: bool = False


_CLOSING: ContextVar[_Closing | None] = ContextVar("closing", default=None)


async def uninterrupted_close(episode: Awaitable[T]) -> T:
    """Run `episode` in a task of its own, where a cancellation waits for `close` to end.

    So an environment that is closing when its episode is cancelled still closes completely, and in the task that opened
    its resources.
    """
    closing = _Closing()
    token = _CLOSING.set(closing)
    try:
        job = asyncio.ensure_future(episode)
    finally:
        _CLOSING.reset(token)
    while not job.done():
        try:
            await asyncio.wait({job})
        except asyncio.CancelledError:
            if job.done():
                if not job.cancelled():
                    job.exception()  # retrieved, so that asyncio does not print it
                raise
            if closing.is_active:
                closing.is_cancelled = True
            else:
                job.cancel()
    return job.result()


async def close(env: Env) -> None:
    """Close the environment and its tools' interpreter, each under a deadline.

    A failure is logged, not raised: it must not hide how the episode ended.
    """
    closing = _CLOSING.get() or _Closing()
    closing.is_active = True
    try:
        await _within_deadline(env, env.close)
        await _within_deadline(env, env.unwrapped.scope.close)
    finally:
        closing.is_active = False
    if closing.is_cancelled:
        raise asyncio.CancelledError


async def _within_deadline(env: Env, closes: Callable[[], Coroutine[Any, Any, None]]) -> None:
    inner = type(env.unwrapped)
    deadline = asyncio.timeout(CLOSE_TIMEOUT_S)
    try:
        with attributed(f"{inner.__name__}.close", passing=TimeoutError, at=inner.close):
            async with deadline:
                await closes()
    except Exception as error:
        late = f"{inner.__name__}.close took more than {CLOSE_TIMEOUT_S:g} s" if deadline.expired() else error
        log.warning("%s", late)
        log.debug("%s.close failed", inner.__name__, exc_info=True)


def add_counts(total: dict[str, float], info: Mapping[str, Any]) -> None:
    """Add the finite numbers of a step's info to the episode's."""
    for key, value in info.items():
        if isinstance(value, Real) and math.isfinite(value):
            total[key] = total.get(key, 0.0) + float(value)  # NumPy's numbers cannot be saved
