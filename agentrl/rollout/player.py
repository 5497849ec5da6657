"""Turns a task into a group of trajectories, with all a run has settled: environment, tokenizer, limits."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.chat.proxy import ChatProxy
from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.env import Env
from agentrl.rollout.episode import run_group
from agentrl.run_folder import EpisodeKind
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Task, TrajectoryGroup


class Player:
    """One per run; each episode gets an environment of its own."""

    def __init__(self, config: Config, *, make_env: Callable[[], Env], tokenizer: TurnTokenizer) -> None:
        self._config = config
        self._make_env = make_env
        self._tokenizer = tokenizer
        self._proxy = ChatProxy()  # serves nothing until an AgentEnv is played

    async def play_group(self, engine: Engine, group_id: int, task: Task, *, kind: EpisodeKind) -> TrajectoryGroup:
        """A training group, or the samples of one held-out task. Raises InfraError."""
        config = self._config
        training = kind == "train"
        return await run_group(
            self._make_env,
            task,
            group_id=group_id,
            size=config.rollout.group_size if training else config.eval.samples_per_task,
            engine=engine,
            tokenizer=self._tokenizer,
            limits=config.rollout,
            max_turns=config.env.max_turns,
            temperature=config.rollout.temperature if training else config.eval.temperature,
            top_p=config.rollout.top_p if training else config.eval.top_p,
            seed=config.seed,
            request_seeds=config.engine.request_seeds,
            name=f"{kind}-{group_id}",
            proxy=self._proxy,
        )
