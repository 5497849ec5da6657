"""The settings of a run's episodes, and which episodes an attempt plays. Independent of models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.config import Config, RolloutConfig
from agentrl.env import Env
from agentrl.run_folder import EpisodeKind
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Sampling, Task

RETRY_BACKOFF_S = 0.5
"""Wait before the first retry of an episode; doubles with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at one episode of a task.

    >>> Attempt(task=Task(id="t", prompt="?"), episode_id="train-7-0", number=1).session_id
    'train-7-0-1'
    """

    task: Task
    episode_id: str
    number: int = 0  # 0 is the first
    seed: int = 0  # the same for every attempt at the episode

    @property
    def session_id(self) -> str:
        """Session of the attempt's requests to the engine; unique over attempts."""
        return f"{self.episode_id}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How the episodes of one kind of group are played.

    RolloutSettings(config=RolloutConfig(max_context=2048), max_turns=4)
    """

    config: RolloutConfig
    max_turns: int | None = None  # None: the environment's own
    seed: int = 0
    request_seeds: bool = False
    """Whether each request has a seed, made of `seed`, the task, the group, the member and the request's number."""
    backoff_s: float = RETRY_BACKOFF_S

    def turn_budget(self, env: Env) -> int:
        """Turns that the model has in an episode of `env`."""
        return env.max_turns if self.max_turns is None else self.max_turns

    def sampling(self, tokenizer: TurnTokenizer, *, stop: tuple[str, ...] = ()) -> Sampling:
        """What each turn is generated with, up to its own limit of tokens."""
        return Sampling(
            max_tokens=self.config.max_turn_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop_token_ids=tokenizer.stop_token_ids,
            stop=stop,
        )

    def request_seed(self, attempt: Attempt) -> int | None:
        """What the seeds of an attempt's requests are made of; None: they have none."""
        return attempt.seed if self.request_seeds else None


def settings_of(config: Config) -> dict[EpisodeKind, RolloutSettings]:
    """The settings of a run's training groups, and of the samples of held-out tasks."""
    train = RolloutSettings(
        config=config.rollout.model_copy(update={"group_size": config.rollout.num_plays}),
        max_turns=config.env.max_turns,
        seed=config.seed,
        request_seeds=config.engine.request_seeds,
    )
    changes = {
        "group_size": config.eval.samples_per_task,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
    }
    return {"train": train, "eval": replace(train, config=config.rollout.model_copy(update=changes))}
