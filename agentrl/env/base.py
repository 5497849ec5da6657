"""`Env`: what every environment is, whatever its actions look like. Speaks messages; one object is one episode.

Knows nothing of tools' arguments, of who drives it, or of how a class is found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.env.episode import Action, Episode, Split, StepResult
from agentrl.env.providers import Scope
from agentrl.errors import ConfigError
from agentrl.tools import ToolSpec
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient


class Env(ABC):
    """One episode. Subclass `ToolEnv` for tools; subclass this for games and dialogues.

    Override `tasks`, `reset`, `step`, `score`, `close`, `demonstrations` as needed. Whatever raises here is an
    infrastructure failure (EnvError, or SandboxError where the sandbox failed): the episode is retried, never scored.
    """

    max_turns: ClassVar[int] = 8
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0}
    tools: ClassVar[Mapping[str, ToolSpec]] = {}
    kwargs: ClassVar[Mapping[str, Any]] = {}
    """Constructor arguments that `make` fills in: those of `env.kwargs` in a config, or of `register`."""
    _sandbox: SandboxClient | None = None
    _shared: Any = None
    _scope: Scope | None = None

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

    async def close(self) -> None:  # noqa: B027  (most environments hold nothing)
        """Let go of everything. Always called, also after failure and cancellation."""

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
    def unwrapped(self) -> Env:
        """The environment inside all wrappers: itself, where there is none."""
        return self

    @property
    def scope(self) -> Scope:
        """What this episode holds for its tools' private arguments."""
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
