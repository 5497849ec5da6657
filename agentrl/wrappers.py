"""Wrappers: an environment around an environment, which changes one thing and hands on the rest.

Knows messages and rewards; nothing of tokens, or of what is wrapped.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import WrapperConfig
from agentrl.env.agent_env import AgentEnv
from agentrl.env.base import Env
from agentrl.env.driver import total_reward
from agentrl.env.episode import STEP_REWARD, Action, Episode, StepResult
from agentrl.env.providers import Scope
from agentrl.env.registry import WrapEnv, load_object
from agentrl.errors import ConfigError
from agentrl.tools import ToolSpec
from agentrl.types import Message, Task

if TYPE_CHECKING:
    from sandbox.client import SandboxClient


class Wrapper(Env):
    """Hands everything on to `self.env`. Subclass it, and override what shall be different.

    Tools, reward weights, turn budget and resources are those of the inside at any moment, not copies. Tasks and
    demonstrations belong to classes: ask `env.unwrapped` for them.
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

    async def close(self) -> None:
        """See Env.close."""
        await self.env.close()

    # What is a class's own on Env is the inside's here.
    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """Turn budget of the inside."""
        return self.env.max_turns

    @property
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        """Weight of each named reward."""
        return self.env.reward_weights

    @property
    def tools(self) -> Mapping[str, ToolSpec]:  # type: ignore[override]
        """Tools of the inside."""
        return self.env.tools

    def tool_schemas(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """What the chat template renders under `tools`."""
        return self.env.tool_schemas()

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
    """Ends an episode as truncated after so many turns, or so many seconds since `reset`.

    A step that is still running when the seconds are over is cancelled. Seconds include the model's own: where they
    bite depends on the machine, so prefer turns for what is trained on.
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
        """The clock starts."""
        self._num_turns = 0
        if self._seconds is not None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """`truncated` when the limit is reached."""
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
    """Multiplies what rewards count: all of them by a number, or each name by its own.

    The named rewards stay as they are, so that curves stay comparable; their weights, and so the reward that is
    trained on, are scaled. `RewardScale(env, scale={"correct": 1.0, "step": 0.1})`.
    """

    def __init__(self, env: Env, *, scale: float | Mapping[str, float]) -> None:
        super().__init__(env)
        known = {*env.reward_weights, STEP_REWARD}
        if isinstance(scale, Mapping) and (unknown := sorted(scale.keys() - known)):
            raise ConfigError(f"RewardScale: there is no reward {unknown[0]!r}; rewards: {', '.join(sorted(known))}")
        self._scale = scale

    @property
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        """The inside's, scaled."""
        weights = {STEP_REWARD: 1.0, **self.env.reward_weights}
        return {name: weight * self._factor(name) for name, weight in weights.items()}

    def _factor(self, name: str) -> float:
        return self._scale.get(name, 1.0) if isinstance(self._scale, Mapping) else self._scale


class ToolBudget(Wrapper):
    """At most `calls` tool calls an episode. A further one is not run but answered, and counted.

    `info["refused_calls"]` counts them; they are in `tool_calls` and `tool_errors`, too.
    """

    def __init__(self, env: Env, *, calls: int) -> None:
        super().__init__(env)
        if calls < 0:
            raise ConfigError(f"ToolBudget: calls={calls} must not be negative")
        self._budget = calls
        self._left = calls

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The whole budget is there again."""
        self._left = self._budget
        return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """The calls that the budget allows go on to the inside."""
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
    """`more` behind the answers to calls, so that all answers stand in the order of their calls."""
    last = max((i for i, message in enumerate(observation) if message.tool_call_id is not None), default=-1)
    return [*observation[: last + 1], *more, *observation[last + 1 :]]


class Record(Wrapper):
    """Appends each episode to a JSONL file when it is closed: task, messages, rewards, and how it ended.

    An episode that failed or was cancelled is written, too, with `"rewards": null` and the messages the environment
    saw. Many episodes may write to one file at once.
    """

    def __init__(self, env: Env, *, path: str | Path) -> None:
        super().__init__(env)
        self._path = Path(path)
        self._line: dict[str, Any] | None = None
        self._started = 0.0

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Begin a new line."""
        self._started = time.monotonic()
        ends = {"rewards": None, "reward": None, "stop_reason": None}
        self._line = {"task": asdict(task), "seed": seed, "messages": [], "step_rewards": [], **ends}
        observation, info = await self.env.reset(task=task, seed=seed)
        self._line["messages"] += map(asdict, observation)
        return observation, info

    async def step(self, action: Action) -> StepResult:
        """Keep what was said."""
        line = self._line or {"messages": [], "step_rewards": []}
        line["messages"].append(asdict(action.message))
        result = await self.env.step(action)
        line["messages"] += map(asdict, result.observation)
        line["step_rewards"].append(result.reward)
        return result

    async def score(self, episode: Episode) -> dict[str, float]:
        """Keep the rewards, and the messages as the model saw them."""
        rewards = await self.env.score(episode)
        if self._line is not None:
            self._line |= {
                "messages": [asdict(message) for message in episode.messages],
                "rewards": rewards | ({STEP_REWARD: episode.step_reward} if episode.step_reward else {}),
                "reward": total_reward(self, rewards, episode.step_reward),
                "stop_reason": str(episode.stop_reason),
            }
        return rewards

    async def close(self) -> None:
        """Write the line, whatever happened."""
        line, self._line = self._line, None
        try:
            await self.env.close()
        finally:
            if line is not None:
                self._append(line | {"wall_s": round(time.monotonic() - self._started, 3)})

    def _append(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write of whole lines to a file opened for appending: episodes do not mix.
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode(errors="replace"))


def load_wrappers(configs: Iterable[WrapperConfig]) -> tuple[WrapEnv, ...]:
    """What `make(..., wrappers=...)` takes, for `env.wrappers` of a config. Raises ConfigError, naming the wrapper."""
    return tuple(_load(config) for config in configs)


def _load(config: WrapperConfig) -> WrapEnv:
    where = f"env.wrappers: {config.name}"
    shipped = {cls.__name__: cls for cls in Wrapper.__subclasses__() if cls.__module__ == __name__}
    found: Any = shipped.get(config.name)
    if found is None and ":" in config.name:
        found = load_object(config.name)
    if not (isinstance(found, type) and issubclass(found, Wrapper)):
        known = f"known: {', '.join(sorted(shipped))}; your own: module:Class or path/to/file.py:Class"
        raise ConfigError(f"{where} is not a wrapper; {known}")
    try:
        inspect.signature(found).bind(None, **config.kwargs)
    except TypeError as error:
        raise ConfigError(f"{where} does not take the arguments {config.kwargs}: {error}") from error
    return partial(found, **config.kwargs)
