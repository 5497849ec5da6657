"""Wrappers: environments around an environment, each of which changes one thing and forwards the rest.

They see messages and rewards. Independent of tokens, and of the environment inside.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.config import WrapperConfig
from agentrl.env.agent_env import AgentEnv
from agentrl.env.base import STEP_REWARD, Action, Env, Episode, Scope, StepResult
from agentrl.env.registry import WrapEnv, load_object
from agentrl.errors import ConfigError
from agentrl.tools import ToolSpec
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient


class Wrapper(Env):
    """Forwards everything to `self.env`. Subclass it and override what should be different.

    Tools, reward weights, turn budget and resources are read from the inner environment whenever they are needed, not
    copied. Tasks and demonstrations belong to classes: use `env.unwrapped` for them. Raises ConfigError around an
    environment that brings its own loop.

    Example:
        class Shout(Wrapper):
            async def step(self, action):
                result = await self.env.step(action)
                louder = [replace(message, content=message.content.upper()) for message in result.observation]
                return result._replace(observation=louder)
    """

    def __init__(self, env: Env) -> None:
        if isinstance(env.unwrapped, AgentEnv):
            raise ConfigError(f"{type(env.unwrapped).__name__} brings its own loop: no wrapper sees its turns")
        self.env = env

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Env.reset."""
        return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """See Env.step."""
        return await self.env.step(action)

    async def score(self, episode: Episode) -> dict[str, float]:
        """See Env.score."""
        return await self.env.score(episode)

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """See Env.score_group."""
        return await self.env.score_group(episodes)

    async def close(self) -> None:
        """See Env.close."""
        await self.env.close()

    # Class attributes of Env, forwarded to the inner environment.
    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """Turn budget of the inner environment."""
        return self.env.max_turns

    @property
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        """Weight of each named reward."""
        return self.env.reward_weights

    @property
    def tools(self) -> Mapping[str, ToolSpec]:  # type: ignore[override]
        """Tools of the inner environment."""
        return self.env.tools

    def tool_schemas(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The tools as the chat template renders them."""
        return self.env.tool_schemas()

    @property
    def scores_groups(self) -> bool:
        """Whether the inner environment does, or this wrapper."""
        return type(self).score_group is not Wrapper.score_group or self.env.scores_groups

    @property
    def unwrapped(self) -> Env:
        """The environment inside all wrappers."""
        return self.env.unwrapped

    @property
    def scope(self) -> Scope:
        """See Env.scope."""
        return self.env.scope

    @property
    def shared(self) -> Any:
        """See Env.shared."""
        return self.env.shared

    @property
    def sandbox(self) -> SandboxClient:
        """See Env.sandbox."""
        return self.env.sandbox


class TimeLimit(Wrapper):
    """Ends an episode as truncated after a number of turns, or of seconds since `reset`.

    A step that is still running when the time is up is cancelled. The seconds include the model's generation, so the
    limit depends on the machine: prefer turns in training.

    Example:
        env = TimeLimit(make("Countdown-v0"), turns=4)
    """

    def __init__(self, env: Env, *, turns: int | None = None, seconds: float | None = None) -> None:
        super().__init__(env)
        if turns is None and seconds is None:
            raise ConfigError("TimeLimit: give turns, seconds or both")
        if (turns is not None and turns < 1) or (seconds is not None and seconds <= 0):
            raise ConfigError(f"TimeLimit: turns={turns} and seconds={seconds} must be positive")
        self._turns, self._seconds = turns, seconds
        self._num_turns, self._deadline = 0, float("inf")

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """The smaller of both budgets."""
        inside = self.env.max_turns
        return inside if self._turns is None else min(inside, self._turns)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start the clock."""
        self._num_turns = 0
        if self._seconds is not None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """`truncated` is set when the limit is reached."""
        self._num_turns += 1
        clock = asyncio.timeout_at(None if self._seconds is None else self._deadline)
        try:
            async with clock:
                result = await self.env.step(action)
        except TimeoutError:
            if not clock.expired():
                raise
            return StepResult([], 0.0, False, True, {"time_limit": 1})
        is_over = self._turns is not None and self._num_turns >= self._turns
        if is_over and not result.terminated:
            return result._replace(truncated=True, info={**result.info, "time_limit": 1})
        return result


class RewardScale(Wrapper):
    """Multiplies the weights of rewards: all of them by one number, or each name by its own.

    The named rewards stay as they are, so that curves stay comparable; their weights, and so the reward that is
    trained on, are scaled. Raises ConfigError for a name that the environment does not have.

    Example:
        env = RewardScale(make("Countdown-v0"), scale={"correct": 1.0, "step": 0.1})
    """

    def __init__(self, env: Env, *, scale: float | Mapping[str, float]) -> None:
        super().__init__(env)
        known = {*env.reward_weights, STEP_REWARD}
        if isinstance(scale, Mapping) and (unknown := sorted(scale.keys() - known)):
            raise ConfigError(f"RewardScale: there is no reward {unknown[0]!r}; rewards: {', '.join(sorted(known))}")
        self._scale = scale

    @property
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        """The weights of the inner environment, scaled."""
        weights = {STEP_REWARD: 1.0, **self.env.reward_weights}
        return {name: weight * self._factor(name) for name, weight in weights.items()}

    def _factor(self, name: str) -> float:
        return self._scale.get(name, 1.0) if isinstance(self._scale, Mapping) else self._scale


class ToolBudget(Wrapper):
    """Permits at most `calls` tool calls in an episode. Further calls are not run but answered, and counted.

    `info["refused_calls"]` counts them. They also count in `tool_calls` and `tool_errors`.

    Example:
        env = ToolBudget(make("Countdown-v0"), calls=3)
    """

    def __init__(self, env: Env, *, calls: int) -> None:
        super().__init__(env)
        if calls < 0:
            raise ConfigError(f"ToolBudget: calls={calls} must not be negative")
        self._budget = calls
        self._left = calls

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Restore the whole budget."""
        self._left = self._budget
        return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """Forward the calls that the budget allows."""
        calls = action.message.tool_calls
        allowed, refused = calls[: self._left], calls[self._left :]
        if not refused:
            self._left -= len(calls)
            return await self.env.step(action)
        self._left = 0
        text = f"Error: the budget of {self._budget} tool calls is spent; this call was not run. Give your answer."
        answers = [Message(role="tool", content=text, tool_call_id=call.id) for call in refused]
        counts = {"tool_calls": len(refused), "tool_errors": len(refused), "refused_calls": len(refused)}
        if not allowed and not action.parse_errors:
            return StepResult(answers, 0.0, False, False, counts)
        shorter = replace(action, message=replace(action.message, tool_calls=allowed))
        result = await self.env.step(shorter)
        info = {**result.info, **{key: result.info.get(key, 0) + count for key, count in counts.items()}}
        return result._replace(observation=_after_answers(result.observation, answers), info=info)


def _after_answers(observation: Sequence[Message], more: Iterable[Message]) -> list[Message]:
    """Insert `more` after the answers to calls, so that all answers are in the order of their calls."""
    last = max((i for i, message in enumerate(observation) if message.tool_call_id is not None), default=-1)
    return [*observation[: last + 1], *more, *observation[last + 1 :]]


WRAPPERS: Mapping[str, type[Wrapper]] = {cls.__name__: cls for cls in (TimeLimit, ToolBudget, RewardScale)}
"""The names that `env.wrappers` of a config takes."""


def load_wrappers(configs: Iterable[WrapperConfig], *, key: str = "env.wrappers") -> tuple[WrapEnv, ...]:
    """The wrappers that a config has under `key`, for `make(..., wrappers=...)`. Raises ConfigError, naming one."""
    return tuple(_load(config, key) for config in configs)


def _load(config: WrapperConfig, key: str) -> WrapEnv:
    where = f"{key}: {config.name}"
    found: Any = WRAPPERS.get(config.name)
    if found is None and ":" in config.name:
        found = load_object(config.name)
    if not (isinstance(found, type) and issubclass(found, Wrapper)):
        known = f"known: {', '.join(sorted(WRAPPERS))}; your own: module:Class or path/to/file.py:Class"
        raise ConfigError(f"{where} is not a wrapper; {known}")
    try:
        inspect.signature(found.__init__).bind(None, None, **config.kwargs)  # itself, and the inner environment
    except TypeError as error:
        raise ConfigError(f"{where} does not take the arguments {config.kwargs}: {error}") from error
    return partial(found, **config.kwargs)
