"""Environments: what a user writes (`Env`, `ToolEnv`), and how one is found, made and played.

Speaks messages only; knows nothing of tokens, engines or HTTP. One object is one episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import logging
import math
import pkgutil
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from agentrl.errors import AgentRLError, ConfigError, EnvError, SandboxError
from agentrl.tools import ToolArgumentError, ToolSpec, collect_tools
from agentrl.types import FinishReason, Message, StopReason, Task, ToolCall

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

Split = Literal["train", "test"]
STEP_REWARD = "step"
"""Name under which the sum of the rewards that `step` returned is recorded."""
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model did in one turn: its message with parsed calls, and what did not parse."""

    message: Message
    parse_errors: tuple[str, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP


class StepResult(NamedTuple):
    """Gymnasium's 5-tuple. `observation` holds the new messages only."""

    observation: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished conversation, as `score` sees it. `rewards` is filled in after scoring."""

    task: Task
    messages: tuple[Message, ...]
    stop_reason: StopReason
    step_reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def final_text(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


class Env(ABC):
    """One episode. Subclass `ToolEnv` for tools; subclass this for games and dialogues.

    Override `tasks`, `reset`, `step`, `score`, `close`, `demonstrations` as needed. Whatever raises here is an
    infrastructure failure (EnvError, or SandboxError where the sandbox failed): the episode is retried, never scored.
    """

    max_turns: ClassVar[int] = 8
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0}
    tools: ClassVar[Mapping[str, ToolSpec]] = {}
    _sandbox: SandboxClient | None = None

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


class ToolEnv(Env):
    """An environment whose `@tool` methods the model may call; a turn without a call ends the episode.

    A call that cannot be understood (unknown tool, bad JSON, bad arguments) is answered by a short `tool` message and
    counted in `info["tool_errors"]`.
    """

    max_parallel_calls: ClassVar[int] = 4

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tools = collect_tools(cls)

    async def step(self, action: Action) -> StepResult:
        """Run the calls of one turn, in order."""
        calls = action.message.tool_calls
        observation: list[Message] = []
        num_errors = 0
        started = time.monotonic()
        for index, call in enumerate(calls):
            text, is_error = await self._answer(call, index)
            num_errors += is_error
            # A tool may hand on lone surrogates from hostile output; they are no text and no tokenizer takes them.
            text = text.encode(errors="replace").decode()
            observation.append(Message(role="tool", content=text, tool_call_id=call.id))
        for error in action.parse_errors:
            num_errors += 1
            observation.append(Message(role="tool", content=f"Error: {error}"))
        info = {
            "tool_calls": len(calls) + len(action.parse_errors),
            "tool_errors": num_errors,
            "tool_s": time.monotonic() - started,
        }
        return StepResult(observation, 0.0, not observation, False, info)

    async def _answer(self, call: ToolCall, index: int) -> tuple[str, bool]:
        """What the model sees, and whether the call was in error."""
        if index >= self.max_parallel_calls:
            return f"Error: at most {self.max_parallel_calls} tool calls a turn; this one was not run", True
        spec = self.tools.get(call.name)
        if spec is None:
            return f"Error: there is no tool {call.name!r}; tools: {', '.join(self.tools) or 'none'}", True
        try:
            with attributed(f"tool {call.name}", passing=ToolArgumentError):
                return await spec.call(self, call.arguments), False
        except ToolArgumentError as error:
            return f"Error: {error}", True


@contextlib.contextmanager
def attributed(what: str, *, passing: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Failures inside become SandboxError where the sandbox service failed, EnvError otherwise; once.

    Errors already attributed, cancellation, and the types in `passing` go through untouched.
    """
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        if passing and isinstance(error, passing):
            raise
        kind = SandboxError if _is_sandbox_failure(error) else EnvError
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


def _is_sandbox_failure(error: Exception) -> bool:
    from sandbox.client import SandboxUnavailable

    return isinstance(error, SandboxUnavailable)


async def play_script(env: Env, task: Task, messages: Sequence[Message], seed: int = 0) -> Episode:
    """Drive `env` with scripted assistant messages, score it, and close it, whatever happens.

    Returns the scored Episode: COMPLETED when the environment terminated, TRUNCATED when it said so, MAX_TURNS when
    the script or the turn budget ran out first. Raises InfraError exactly as a rollout does.
    """
    try:
        observation = await start(env, task, seed)
        dialogue: list[Message] = list(observation)
        info: dict[str, float] = {}
        step_reward, stop_reason = 0.0, StopReason.MAX_TURNS
        for message in messages[: env.max_turns]:
            dialogue.append(message)
            result = await advance(env, Action(message=message))
            dialogue.extend(result.observation)
            add_counts(info, result.info)
            step_reward += result.reward
            if result.terminated or result.truncated:
                stop_reason = StopReason.COMPLETED if result.terminated else StopReason.TRUNCATED
                break
        episode = Episode(
            task=task, messages=tuple(dialogue), stop_reason=stop_reason, step_reward=step_reward, info=info
        )
        return await scored(env, episode)
    finally:
        await close(env)


async def start(env: Env, task: Task, seed: int | None) -> list[Message]:
    """`reset`, its failures attributed."""
    with attributed(f"{type(env).__name__}.reset of task {task.id}"):
        observation, _ = await env.reset(task=task, seed=seed)
    if not observation:
        raise EnvError(f"{type(env).__name__}.reset of task {task.id} returned no message")
    return observation


async def advance(env: Env, action: Action) -> StepResult:
    """`step`, its failures attributed and its result checked."""
    with attributed(f"{type(env).__name__}.step"):
        result = StepResult(*await env.step(action))
    if not math.isfinite(result.reward):
        raise EnvError(f"{type(env).__name__}.step returned reward {result.reward}: it must be finite")
    if not (result.terminated or result.truncated or result.observation):
        raise EnvError(f"{type(env).__name__}.step returned no observation, yet the episode goes on")
    return result


async def scored(env: Env, episode: Episode, *, timeout_s: float | None = None) -> Episode:
    """The episode with its named rewards and their weighted sum.

    Raises EnvError when it takes too long, a name is unknown to `reward_weights` or missing, or a value is not finite.
    """
    name = type(env).__name__
    try:
        async with asyncio.timeout(timeout_s):
            with attributed(f"{name}.score of task {episode.task.id}"):
                rewards = dict(await env.score(episode))
    except TimeoutError as error:
        raise EnvError(f"scoring task {episode.task.id} took more than {timeout_s:g} s") from error
    weights = dict(env.reward_weights)
    if episode.step_reward:
        rewards[STEP_REWARD] = episode.step_reward
        weights.setdefault(STEP_REWARD, 1.0)
    for key, value in rewards.items():
        if key not in weights:
            raise EnvError(f"{name}.score returned {key!r}, which reward_weights does not name: {sorted(weights)}")
        if not math.isfinite(value):
            raise EnvError(f"{name}.score returned {key}={value}: it must be finite")
    missing = weights.keys() - rewards.keys() - {STEP_REWARD}
    if missing and type(env).score is not Env.score:
        raise EnvError(f"{name}.score did not return {sorted(missing)}")
    reward = sum(weights[key] * value for key, value in rewards.items())
    return replace(episode, rewards=rewards, reward=float(reward))


async def close(env: Env) -> None:
    """`close` under a deadline. A failure is logged, not raised: it must not hide how the episode ended."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await env.close()
    except Exception:
        log.warning("%s.close failed", type(env).__name__, exc_info=True)


def add_counts(total: dict[str, float], info: Mapping[str, Any]) -> None:
    """Add the numbers of a step's info to the episode's."""
    for key, value in info.items():
        if isinstance(value, int | float):
            total[key] = total.get(key, 0.0) + value


_REGISTRY: dict[str, type[Env]] = {}
E = TypeVar("E", bound=type[Env])


def register(env_id: str) -> Callable[[E], E]:
    """Class decorator: makes the class available to `make` and to configs under an id such as `AimePython-v0`."""

    def decorate(cls: E) -> E:
        known = _REGISTRY.get(env_id)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"environment id {env_id!r} is taken by {known.__module__}:{known.__qualname__}")
        _REGISTRY[env_id] = cls
        return cls

    return decorate


def make(target: str | type[Env], *, sandbox: SandboxClient | None = None, **kwargs: Any) -> Env:
    """A new environment for one episode; `kwargs` go to its constructor."""
    cls = load_env_class(target) if isinstance(target, str) else target
    try:
        env = cls(**kwargs)
    except TypeError as error:
        raise ConfigError(f"cannot make {cls.__name__}: {error}") from error
    env._sandbox = sandbox
    return env


def load_env_class(target: str) -> type[Env]:
    """Find a class by `module:Class`, `path/to/file.py:Class`, or registered id. Raises ConfigError with the mend."""
    place, separator, name = target.rpartition(":")
    if not separator:
        return _registered(target)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Env):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise ConfigError(f"{target} is abstract: it does not define {missing}")
        return found
    classes = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Env)]
    what = "is not an Env class" if found is not None else "does not exist"
    raise ConfigError(f"{target}: {name!r} {what}{_suggest(name, classes)}")


def _registered(env_id: str) -> type[Env]:
    if env_id not in _REGISTRY:
        import envs

        for info in pkgutil.iter_modules(envs.__path__):
            importlib.import_module(f"envs.{info.name}")
    if env_id not in _REGISTRY:
        raise ConfigError(
            f"there is no environment {env_id!r}{_suggest(env_id, list(_REGISTRY))}; "
            "your own: module:Class or path/to/file.py:Class"
        )
    return _REGISTRY[env_id]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {name!r} on the import path; a file is given as path/to/file.py:Class"
            ) from error
        raise ConfigError(f"cannot import {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"agentrl_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: type hints are resolved through sys.modules
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    return module


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
