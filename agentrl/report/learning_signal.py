"""Why a run learns or does not: the share of finished groups that are useful, and what the others have in common.

A group is useful where its rewards differ: with equal rewards a baseline leaves no gradient, and the buffer drops it.
Everything is a sum over groups, so windows, steps and whole runs are added up. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from agentrl.report.statistics import has_spread, is_correct
from agentrl.types import EpisodeRecord, TrajectoryGroup

LOW_SHARE = 1 / 3
"""A smaller useful share than this needs a cause."""
MIN_GROUPS = 8
NEARLY_ALL = 0.9
SAME_REWARD = 0.05
"""Unsolved groups whose mean rewards have a smaller standard deviation than this fail in the same way."""
LOW_VARIETY = 0.25
LOW_NATS_PER_TOKEN = 0.01
PREFIX = "signal/"


class Cause(StrEnum):
    """Why groups have equal rewards. The value is what a step's line says."""

    ALWAYS_SOLVED = "all solved"
    """Nearly all of them were solved by every episode."""
    NEVER_SOLVED = "none solved"
    """Nearly all of them were solved by no episode."""
    BY_TASK = "by task"
    """Some tasks are solved every time, the others never: rewards differ between tasks and not within them."""
    MEMORISED = "memorised"
    """The same, and the episodes of a task are nearly identical: each has its one answer, right or wrong."""
    LOW_ENTROPY = "low entropy"
    """They fail alike, and the episodes of a group are nearly identical."""


REMEDIES: Mapping[Cause, str] = {
    Cause.ALWAYS_SOLVED: "Little is left to learn from these tasks: use harder ones; rollout.task_choice=difficulty "
    "plays those that are not solved every time more often.",
    Cause.NEVER_SOLVED: "The tasks are too hard for this model, or correct answers are not recognised (read some "
    "episodes: `agentrl rollout CONFIG --show`). Use easier tasks, rewards for partial success, a larger model, a "
    "longer warm start, or a larger rollout.group_size.",
    Cause.BY_TASK: "Whether an episode succeeds depends on the task alone: difficulty differs too much. Use tasks of "
    "middle difficulty, rollout.task_choice=difficulty, or a larger rollout.group_size.",
    Cause.MEMORISED: "Each task has its one answer, right or wrong, as after a long warm start on few rows: start from "
    "a shorter warm start on more rows or an earlier checkpoint, and train on tasks that these have not seen; lower "
    "learner.lr if the variety was lost in this run.",
    Cause.LOW_ENTROPY: "The model repeats the same failure, so more episodes of a task show nothing new: start from "
    "weights with more variety (a shorter warm start on more rows, an earlier checkpoint, a larger model), or lower "
    "learner.lr if the variety was lost in this run.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSignal:
    """Sums over finished groups; `+` adds groups, `-` takes some out. "Useless" groups have equal rewards.

    Example:
        signal = total(signal_of(group) for group in groups)
        signal.useful_share, signal.cause  # (0.1, Cause.BY_TASK)
    """

    groups: float = 0.0
    useful: float = 0.0  # groups
    tokens: float = 0.0  # sampled
    useful_tokens: float = 0.0  # sampled, in useful groups
    solved: float = 0.0  # useless groups that every episode solved
    unsolved: float = 0.0  # useless groups that no episode solved
    reward: float = 0.0  # mean rewards of the useless groups
    unsolved_reward: float = 0.0  # mean rewards of the unsolved groups
    unsolved_reward_squares: float = 0.0
    variety: float = 0.0  # of useless groups: 0 where all episodes are the same, 1 where no two are
    nats: float = 0.0  # -logprob of the sampled tokens in useless groups

    def __add__(self, other: LearningSignal) -> LearningSignal:
        return LearningSignal(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __sub__(self, other: LearningSignal) -> LearningSignal:
        return LearningSignal(**{one.name: getattr(self, one.name) - getattr(other, one.name) for one in fields(self)})

    @property
    def useless(self) -> float:
        """Groups with equal rewards."""
        return self.groups - self.useful

    @property
    def useful_share(self) -> float:
        """Share of the groups that are useful; 1 without groups."""
        return self.useful / self.groups if self.groups else 1.0

    @property
    def useful_token_share(self) -> float:
        """Share of the sampled tokens that are in useful groups; 1 without tokens."""
        return self.useful_tokens / self.tokens if self.tokens else 1.0

    @property
    def cause(self) -> Cause | None:
        """Why most groups are useless; None where they are not, or where too few have finished to tell."""
        if self.groups < MIN_GROUPS or self.useful_share >= LOW_SHARE:
            return None
        if self.solved >= NEARLY_ALL * self.useless:
            return Cause.ALWAYS_SOLVED
        if self.unsolved >= NEARLY_ALL * self.useless and self._unsolved_std < SAME_REWARD:
            return Cause.LOW_ENTROPY if self._repeats_itself else Cause.NEVER_SOLVED
        return Cause.MEMORISED if self._repeats_itself else Cause.BY_TASK

    @property
    def remedy(self) -> str:
        """What to do about the cause; empty without one."""
        return REMEDIES[self.cause] if self.cause else ""

    def metrics(self) -> dict[str, float]:
        """The shares as `rollout/useful_*`, and every sum as `signal/*`. Empty without groups."""
        if not self.groups:
            return {}
        shares = {"rollout/useful_groups": self.useful_share, "rollout/useful_tokens": self.useful_token_share}
        return shares | {PREFIX + name: value for name, value in asdict(self).items()}

    def share_sentence(self) -> str:
        """How many groups were useful.

        >>> LearningSignal(groups=40, useful=4).share_sentence()
        '10 % of 40 finished groups were useful (their rewards differ)'
        """
        return f"{_percent(self.useful_share)} of {self.groups:.0f} finished groups were useful (their rewards differ)"

    def outcome_sentence(self) -> str:
        """What the useless groups have in common, in numbers.

        >>> LearningSignal(groups=10, solved=4, unsolved=6, reward=4, variety=10, tokens=9, nats=9).outcome_sentence()
        '40 % of those with equal rewards were solved by every episode, 60 % by none (mean reward 0.40)'
        """
        count = max(self.useless, 1.0)
        text = (
            f"{_percent(self.solved / count)} of those with equal rewards were solved by every episode, "
            f"{_percent(self.unsolved / count)} by none (mean reward {self.reward / count:.2f})"
        )
        if self._repeats_itself:
            text += (
                f"; their episodes are nearly identical ({_percent(self.variety / count)} of a group's further "
                f"episodes say something new, {self._nats_per_token:.3f} nats per token)"
            )
        return text

    def lines(self) -> tuple[str, ...]:
        """How many groups were useful and, where they are few, why and what to do. Empty without groups."""
        if not self.groups:
            return ()
        return (self.share_sentence(), self.outcome_sentence(), self.remedy) if self.cause else (self.share_sentence(),)

    def diagnosis(self) -> str:
        """Cause, numbers and remedy; empty where nothing is wrong."""
        return f"{self.outcome_sentence()}. {self.remedy}" if self.cause else ""

    @property
    def _nats_per_token(self) -> float:
        tokens = self.tokens - self.useful_tokens
        return self.nats / tokens if tokens else math.inf

    @property
    def _unsolved_std(self) -> float:
        if not self.unsolved:
            return 0.0
        mean = self.unsolved_reward / self.unsolved
        return math.sqrt(max(0.0, self.unsolved_reward_squares / self.unsolved - mean * mean))

    @property
    def _repeats_itself(self) -> bool:
        return self.variety <= LOW_VARIETY * self.useless or self._nats_per_token <= LOW_NATS_PER_TOKEN


def signal_of(group: TrajectoryGroup, *, needs_spread: bool = True) -> LearningSignal:
    """The signal of one finished group. `needs_spread`: equal rewards have no gradient (AlgorithmConfig.needs_spread).

    An episode is known by its sampled tokens; where none were recorded, by its messages.
    """
    tokens = sum(trajectory.num_action_tokens for trajectory in group.trajectories)
    if not needs_spread or has_spread(group.rewards_G):
        return LearningSignal(groups=1, useful=1, tokens=tokens, useful_tokens=tokens)
    episodes = group.episodes
    solved = [is_correct(episode.segments[0]) for episode in episodes]
    is_unsolved = not any(solved)
    reward = math.fsum(group.episode_rewards) / len(episodes)
    return LearningSignal(
        groups=1,
        tokens=tokens,
        solved=all(solved),
        unsolved=is_unsolved,
        reward=reward,
        unsolved_reward=is_unsolved * reward,
        unsolved_reward_squares=is_unsolved * reward * reward,
        variety=(len(set(map(_text, episodes))) - 1) / max(1, len(episodes) - 1),
        nats=-math.fsum(_logprobs(group)),
    )


def total(signals: Iterable[LearningSignal]) -> LearningSignal:
    """The sum.

    >>> total([LearningSignal(groups=1), LearningSignal(groups=1, useful=1)]).useful_share
    0.5
    """
    return sum(signals, start=LearningSignal())


def signal_in(values: Mapping[str, float]) -> LearningSignal:
    """The signal that `LearningSignal.metrics` put into a line of metrics; without groups where there is none.

    >>> signal_in(LearningSignal(groups=3, useful=1).metrics()).useful
    1
    """
    return LearningSignal(**{one.name: values.get(PREFIX + one.name, 0.0) for one in fields(LearningSignal)})


def _text(episode: EpisodeRecord) -> object:
    said = tuple(turn.completion.token_ids for segment in episode.segments for turn in segment.turns)
    return said or tuple(message.content for segment in episode.segments for message in segment.messages)


def _logprobs(group: TrajectoryGroup) -> Iterable[float]:
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            yield from turn.completion.behavior_logprobs


def _percent(share: float) -> str:
    """A share for people; small ones are not rounded to nothing."""
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
