"""An Env class as a gymnasium.Env with text actions, text observations and blocking calls. Independent of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from agentrl.config import EnvConfig
from agentrl.data.source import TaskSource
from agentrl.env import Env, Split, load_env_class
from agentrl.env.agent_env import AgentEnv
from agentrl.errors import ConfigError
from agentrl.types import Message, Task
from envs.adapters.sync_episode import OpenSandbox, SyncEpisode
from envs.adapters.unicode_space import UnicodeText

MAX_TEST_TASKS = 10_000
"""Largest number of tasks of a test split that are played."""


def to_gymnasium(
    env: type[Env] | str,
    *,
    split: Split = "train",
    data: str | None = None,
    sandbox: OpenSandbox | None = None,
    max_chars: int = 65_536,
    render_mode: str | None = None,
) -> TextEnv:
    """Makes a gymnasium.Env that plays episodes of `env`, task after task.

    Actions are the model's messages, with tool calls as `<tool_call>` JSON. Observations are the texts of the new
    messages; `info["messages"]` has them with their roles. The step rewards of an episode sum to its reward; the last
    one includes that of `score`. `reset(seed=...)` fixes the order of the tasks, and `reset(options={"index": n})`
    plays the n-th of the split. Infrastructure failures raise InfraError.

    Args:
        env: a class or a target, as in a config.
        sandbox: opens the sandbox service on the environment's own event loop, e.g. `SandboxClient.embedded`.
        max_chars: longest observation and action; longer ones are cut.
        render_mode: `ansi` makes `render` return the dialogue so far.

    Raises ConfigError for a class that does not exist, or an AgentEnv, which has its own loop.

    Example:
        env = to_gymnasium("ModMath-v0", split="test", sandbox=SandboxClient.embedded)
        observation, info = env.reset(seed=1)
        observation, reward, terminated, truncated, info = env.step("The answer is \\\\boxed{7}.")
    """
    options: dict[str, Any] = {"env": env, "split": split, "data": data, "sandbox": sandbox, "max_chars": max_chars}
    made = TextEnv(**options, render_mode=render_mode)
    made.spec = EnvSpec(id=f"agentrl/{made.name}", entry_point=f"{__name__}:TextEnv", kwargs=options)
    return made


class TextEnv(gymnasium.Env[str, str]):
    """See `to_gymnasium`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (declared without ClassVar by Gymnasium)

    def __init__(
        self,
        *,
        env: type[Env] | str,
        split: Split,
        data: str | None,
        sandbox: OpenSandbox | None,
        max_chars: int,
        render_mode: str | None = None,
    ) -> None:
        self._env_class = load_env_class(env) if isinstance(env, str) else env
        self.name = self._env_class.__name__
        if issubclass(self._env_class, AgentEnv):
            raise ConfigError(f"{self.name} has its own loop and calls its model itself: it has no steps to call")
        self.observation_space = UnicodeText(max_chars)
        self.action_space = UnicodeText(max_chars)
        self.render_mode = render_mode
        self._split, self._data, self._max_chars = split, data, max_chars
        self._episode = SyncEpisode(self._env_class, sandbox)
        self._tasks: Iterator[Task] | None = None
        self._dialogue: list[Message] = []
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the next task's episode."""
        super().reset(seed=seed)
        if seed is not None or self._tasks is None:
            self._tasks = self._stream()
        index = (options or {}).get("index")
        task = next(self._tasks) if index is None else self._row(int(index))
        self._is_over = True  # should this fail
        reply = self._episode.begin(task, seed=int(self.np_random.integers(2**31)))
        self._is_over, self._dialogue = False, list(reply.messages)
        return self._text_of(reply.messages), {"task": task.id, "messages": _plain(reply.messages)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a message and get the environment's answer. Raises ResetNeeded when no episode runs."""
        if self._is_over:
            raise gymnasium.error.ResetNeeded("no episode is under way: call reset()")
        self._is_over = True  # should this fail
        reply = self._episode.say(action[: self._max_chars])
        self._is_over = reply.terminated or reply.truncated
        self._dialogue += [reply.said, *reply.messages] if reply.said is not None else reply.messages
        info = {"messages": _plain(reply.messages), **reply.counts}
        if self._is_over:
            info["rewards"] = dict(reply.rewards)
        return self._text_of(reply.messages), reply.reward, reply.terminated, reply.truncated, info

    def render(self) -> Any:
        """The dialogue so far."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() needs render_mode='ansi'")
            return None
        return "\n".join(f"{message.role}: {message.content}" for message in self._dialogue)

    def close(self) -> None:
        """End the episode, the environment's shared resources and its loop. May be called again."""
        self._is_over = True
        self._episode.close()

    def _stream(self) -> Iterator[Task]:
        """Endless tasks, in an order that the seed determines."""
        if self._split == "train":
            config = EnvConfig(target=self.name, train_data=self._data)
            source = TaskSource(self._env_class, config, seed=int(self.np_random.integers(2**31)))
            return (source.next() for _ in count())
        rows = list(islice(self._env_class.tasks(self._split, data=self._data), MAX_TEST_TASKS))
        return (rows[int(self.np_random.integers(len(rows)))] for _ in count())

    def _row(self, index: int) -> Task:
        rows = self._env_class.tasks(self._split, data=self._data)
        if (task := next(iter(islice(rows, index, None)), None)) is None:
            raise ConfigError(f"{self.name} has no {self._split} task number {index}")
        return task

    def _text_of(self, messages: Sequence[Message]) -> str:
        return "\n\n".join(message.content for message in messages)[: self._max_chars]


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
