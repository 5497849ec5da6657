"""`Env`: the interface of every environment, and the records that pass between it and its driver.

An environment speaks messages; one object plays one episode. Independent of tools, drivers and the registry.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from agentrl.errors import ConfigError
from agentrl.tools import ToolSpec
from agentrl.types import FinishReason, Message, StopReason, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient, SandboxSession

Split = Literal["train", "test"]
STEP_REWARD = "step"
"""Name under which the sum of the rewards that `step` returned is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the model: its message with parsed calls, and what did not parse.

    Action(message=Message(role="assistant", content="4"))
    """

    message: Message
    parse_errors: tuple[str, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    cut_by: StopReason = StopReason.MAX_TURN_TOKENS
    """Which limit cut the turn, where `finish_reason` is LENGTH: the turn's own budget, or MAX_CONTEXT."""


class StepResult(NamedTuple):
    """Gymnasium's 5-tuple. `observation` holds the new messages only.

    return StepResult([user("Go on.")], reward=0.0, terminated=False, truncated=False, info={})
    """

    observation: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished conversation, as `score` receives it. `rewards` and `reward` are filled in after scoring.

    return {"correct": float(episode.final_text == episode.task.answer)}
    """

    task: Task
    messages: tuple[Message, ...]
    stop_reason: StopReason
    step_reward: float = 0.0  # sum of the rewards that `step` returned
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0  # weighted sum of `rewards`
    info: Mapping[str, float] = field(default_factory=dict)  # counts, and times in seconds

    @property
    def final_text(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


@dataclass(kw_only=True)
class Scope:
    """What an episode gives to its tools' private arguments: its task, and an interpreter opened on first use.

    env.scope.task, env.scope.session
    """

    task: Task | None = None
    seed: int | None = None
    session: SandboxSession | None = None

    async def close(self) -> None:
        """Close the interpreter. Safe to call twice."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()


class Env(ABC):
    """One episode. Subclass `ToolEnv` for tools; subclass this for games and dialogues.

    Override `tasks`, `reset`, `step`, `score`, `score_group`, `close`, `demonstrations` as needed. `reset`, `step`,
    `score`, `score_group` and `close` may be written without `async` where they wait for nothing. An exception from any
    of them is an infrastructure failure (EnvError, or SandboxError where the sandbox failed): the episode is retried,
    never scored.

        class Guess(Env):
            async def reset(self, *, task, seed=None):
                return [user(task.prompt)], {}

            async def step(self, action):
                return StepResult([], float(action.message.content == "7"), True, False, {})
    """

    max_turns: ClassVar[int] = 8
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0}
    tools: ClassVar[Mapping[str, ToolSpec]] = {}
    kwargs: ClassVar[Mapping[str, Any]] = {}
    """Constructor arguments that `make` fills in: those of `env.kwargs` in a config, or of `register`."""
    _sandbox: SandboxClient | None = None
    _shared: Any = None
    _scope: Scope | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make methods that were written without `async` awaitable, so that every caller can await them."""
        if cls.__init__ is object.__init__ and (args or kwargs):  # which refuses them only without this method
            raise TypeError(f"{cls.__name__}() takes no arguments")
        env = super().__new__(cls)
        for name in _plain_methods(cls):
            vars(env)[name] = _as_async(getattr(env, name))
        return env

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Rows to solve: lazy; may be endless for `train`, finite for `test`. `data` is a file of rows."""
        raise ConfigError(f"{cls.__name__} does not define tasks()")

    @abstractmethod
    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start the episode: the first messages (system, user), and info."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer the model's turn."""

    async def score(self, episode: Episode) -> dict[str, float]:
        """Named rewards at the end, once, on the trusted side. The default: all reward came from `step`."""
        return {}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Named rewards that depend on the whole group: those of each episode, in order. [G] The default: none.

        Called once when all episodes of a group are scored, on an object of its own: `reset` is not called on it, and
        `self.shared` and `self.sandbox` work. Each episode has its `rewards` of `score`; the names here are others. An
        exception fails the group, whose score is tried again, and never trains.

            async def score_group(self, episodes):
                longest = max(len(episode.final_text) for episode in episodes)
                return [{"brief": float(len(episode.final_text) < longest)} for episode in episodes]
        """
        return [{} for _ in episodes]

    async def close(self) -> None:  # noqa: B027  (most environments hold nothing)
        """Release everything that the episode holds. Always called, also after failure and cancellation."""

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """Assistant messages of one scripted episode, in order; None when the environment offers none.

        With probability 1 - `skill` a plausible wrong approach. The same arguments give the same script.
        """
        return None

    @classmethod
    def open_shared(cls) -> AbstractAsyncContextManager[Any]:
        """What all episodes of a worker use together: an index, a pool of connections. The default: nothing.

        Override it as `@classmethod @asynccontextmanager async def open_shared(cls)`, with one `yield`. It is entered
        before the first episode and left after the last, in one task; each episode finds the object in `self.shared`.
        What it raises is a failure of the infrastructure.
        """
        return nullcontext()

    @classmethod
    def phrase(cls, answer: str) -> str:
        """A last message that gives `answer`: how `check_env` says gold and wrong answers. Boxed, unless overridden."""
        return f"The answer is \\boxed{{{answer}}}."

    @property
    def shared(self) -> Any:
        """What `open_shared` yielded. Raises ConfigError when it was not opened: see `agentrl.env.opened`."""
        if self._shared is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name} has no shared resources: define open_shared(), and make it inside `opened({name})`"
            )
        return self._shared

    @property
    def scores_groups(self) -> bool:
        """Whether `score_group` gives rewards."""
        return type(self).score_group is not Env.score_group

    @property
    def unwrapped(self) -> Env:
        """The environment inside all wrappers: itself, where there is none."""
        return self

    @property
    def scope(self) -> Scope:
        """What this episode gives to its tools' private arguments."""
        if self._scope is None:
            self._scope = Scope()
        return self._scope

    @property
    def sandbox(self) -> SandboxClient:
        """The sandbox service, injected by `make`. Raises ConfigError when there is none."""
        if self._sandbox is None:
            raise ConfigError(f"{type(self).__name__} runs code, but no sandbox was given: make(..., sandbox=client)")
        return self._sandbox

    @classmethod
    def tool_schemas(cls) -> list[dict[str, Any]]:
        """What the chat template renders under `tools`."""
        return [spec.schema() for spec in cls.tools.values()]


@functools.cache
def _plain_methods(cls: type[Env]) -> tuple[str, ...]:
    """The asynchronous methods of Env that a class defines without `async`."""
    names = ("reset", "step", "score", "score_group", "close")
    return tuple(name for name in names if not inspect.iscoroutinefunction(getattr(cls, name, None)))


def _as_async(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """`method` as a coroutine function. It runs in the event loop, as `async def` without an `await` would."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return call
