"""Reports to the run's wait graph when an episode waits for its environment: for tools, the sandbox or a grader.

Independent of what the environment does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from agentrl.env.agent_env import AgentEnv
from agentrl.env.base import Action, Env, Episode, StepResult
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.types import Message, Task
from agentrl.wrappers import Wrapper


class MonitoredEnv(Wrapper):
    """A wrapper that only reports waits.

    env = MonitoredEnv(make(Capitals), wait_graph)
    """

    def __init__(self, env: Env, wait_graph: WaitGraph) -> None:
        super().__init__(env)
        self._wait_graph = wait_graph

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """See Env.reset."""
        with self._waiting("reset"):
            return await self.env.reset(task=task, seed=seed)

    async def step(self, action: Action) -> StepResult:
        """See Env.step."""
        with self._waiting("step"):
            return await self.env.step(action)

    async def score(self, episode: Episode) -> dict[str, float]:
        """See Env.score."""
        with self._waiting("score"):
            return await self.env.score(episode)

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """See Env.score_group."""
        with self._waiting("score_group"):
            return await self.env.score_group(episodes)

    @property
    def scores_groups(self) -> bool:
        """Whether the inner environment does."""
        return self.env.scores_groups

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return self._wait_graph.waiting("episodes", on=f"environment {type(self.unwrapped).__name__}", what=what)


def monitored(make_env: Callable[[], Env], wait_graph: WaitGraph) -> Callable[[], Env]:
    """`make_env` with monitoring. An AgentEnv stays as it is: it has no turns that a wrapper could see."""

    def make() -> Env:
        env = make_env()
        return env if isinstance(env.unwrapped, AgentEnv) else MonitoredEnv(env, wait_graph)

    return make
