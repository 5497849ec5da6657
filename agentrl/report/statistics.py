"""Statistics of rewards: avg@n and pass@k with 95 % intervals over tasks, and whether rewards differ at all.

Pure functions, independent of engines, files and grading. Shapes: _T tasks, _N samples of a task. Intervals resample
tasks, since the samples of one task are not independent of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.types import StopReason, Trajectory, TrajectoryGroup

NUM_BLOCKS, RESAMPLES_AT_ONCE = 10, 1_000  # in blocks, so that thousands of tasks fit in memory
TAIL = 0.025  # on either side of the 95 % interval


class Estimate(NamedTuple):
    """A mean over tasks and its 95 % interval. Example: `Estimate(0.5, 0.4, 0.6).low`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one policy on `num_tasks` held-out tasks with `n` samples each.

    Example:
        result = summarize(groups, policy_version=10)
        result.avg, result.pass_at[result.n].value
    """

    policy_version: int
    num_tasks: int
    n: int
    avg: float
    avg_low: float
    avg_high: float
    pass_at: dict[int, Estimate]  # k -> pass@k
    response_tokens_mean: float  # sampled tokens of an episode, all turns
    turns_mean: float
    stop_reasons: dict[StopReason, int]  # episodes
    set_name: str = ""  # of `eval.sets`
    newest_version: int | None = None  # where a server was measured whose weights changed meanwhile

    def metrics(self) -> dict[str, float]:
        """The result under `eval/*` names; that of a named set under `eval/NAME/*`."""
        prefix = f"eval/{self.set_name}/" if self.set_name else "eval/"
        return {name.replace("eval/", prefix, 1): value for name, value in self._unnamed().items()}

    @property
    def versions(self) -> str:
        """The version that was measured, in words. Example: `"version 3"`."""
        if self.newest_version is None:
            return f"version {self.policy_version}"
        return f"versions {self.policy_version} to {self.newest_version}"

    def _unnamed(self) -> dict[str, float]:
        passes = {f"eval/pass_at_{k}": estimate.value for k, estimate in self.pass_at.items()}
        at_n = self.pass_at[self.n]
        num_episodes = sum(self.stop_reasons.values())
        return {
            "eval/avg_at_n": self.avg,
            "eval/avg_at_n_low": self.avg_low,
            "eval/avg_at_n_high": self.avg_high,
            "eval/n": self.n,
            "eval/num_tasks": self.num_tasks,
            "eval/policy_version": self.policy_version,
            "eval/response_tokens_mean": self.response_tokens_mean,
            "eval/turns_mean": self.turns_mean,
            **passes,
            "eval/pass_at_n": at_n.value,
            "eval/pass_at_n_low": at_n.low,
            "eval/pass_at_n_high": at_n.high,
            **{f"eval/stop_{reason}": self.stop_reasons.get(reason, 0) / num_episodes for reason in StopReason},
        }


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the episode solved its task: the reward named `correct` where there is one, else the total, is >= 1."""
    return trajectory.rewards.get("correct", trajectory.reward) >= 1.0


def summarize(groups: Sequence[TrajectoryGroup], *, policy_version: int, seed: int = 0) -> EvalResult:
    """Evaluate a policy from one finished group for each task. n is the smallest group's number of episodes.

    Raises ValueError without groups, or with a group that has no trajectory.
    """
    correct_TN = [[is_correct(episode.segments[0]) for episode in group.episodes] for group in groups]
    episodes = [episode.segments for group in groups for episode in group.episodes]
    average = avg_at_n(correct_TN, seed=seed)
    n = min(len(correct_N) for correct_N in correct_TN)
    return EvalResult(
        policy_version=policy_version,
        num_tasks=len(groups),
        n=n,
        avg=average.value,
        avg_low=average.low,
        avg_high=average.high,
        pass_at={k: pass_at_k(correct_TN, k, seed=seed) for k in _powers_of_two_and(n)},
        response_tokens_mean=sum(map(num_response_tokens, episodes)) / len(episodes),
        turns_mean=sum(map(num_turns, episodes)) / len(episodes),
        stop_reasons=dict(Counter(segments[0].stop_reason for segments in episodes)),
    )


def num_turns(segments: Sequence[Trajectory]) -> float:
    """Turns of an episode; without a token record, the number that the chat endpoint reported."""
    return sum(len(segment.turns) for segment in segments) or segments[0].info.get("turns", 0.0)


def num_response_tokens(segments: Sequence[Trajectory]) -> float:
    """Tokens that the model wrote in an episode; without a token record, the number that the chat endpoint reported."""
    return sum(segment.num_action_tokens for segment in segments) or segments[0].info.get("completion_tokens", 0.0)


def avg_at_n(correct_TN: Sequence[Sequence[bool]], *, seed: int = 0) -> Estimate:
    """Mean over tasks of the share of a task's samples that are correct. Rows may differ in length.

    Raises ValueError without tasks or for a task without samples.
    """
    _require_samples(correct_TN, at_least=1)
    return _mean_over_tasks([sum(correct_N) / len(correct_N) for correct_N in correct_TN], seed=seed)


def pass_at_k(correct_TN: Sequence[Sequence[bool]], k: int, *, seed: int = 0) -> Estimate:
    """Chance that one of k samples is correct: mean over tasks of 1 - C(n - c, k) / C(n, k), n samples, c correct.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1). Raises ValueError when k < 1 or a task
    has fewer than k samples.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    _require_samples(correct_TN, at_least=k)
    solved_T = [
        1.0 - math.comb(len(correct_N) - sum(correct_N), k) / math.comb(len(correct_N), k) for correct_N in correct_TN
    ]
    return _mean_over_tasks(solved_T, seed=seed)


def _mean_over_tasks(score_T: Sequence[float], *, seed: int) -> Estimate:
    """Mean with a percentile-bootstrap interval over tasks (Efron 1979); scores lie in [0, 1].

    When every task scored 0 (or 1), the bootstrap has no variance and would claim certainty. The exact binomial bound
    of Clopper and Pearson 1934 for 0 (or all) successes in T trials replaces it: 1 - (0.025)^(1/T).
    """
    import numpy as np

    mean = math.fsum(score_T) / len(score_T)
    slack = 1.0 - TAIL ** (1.0 / len(score_T))
    if mean == 0.0:
        return Estimate(0.0, 0.0, slack)
    if mean == 1.0:
        return Estimate(1.0, 1.0 - slack, 1.0)
    scores_T = np.asarray(score_T)
    rng = np.random.default_rng(seed)
    size = (RESAMPLES_AT_ONCE, len(scores_T))
    means = [scores_T[rng.integers(0, len(scores_T), size)].mean(axis=1) for _ in range(NUM_BLOCKS)]
    low, high = np.quantile(np.concatenate(means), [TAIL, 1.0 - TAIL])
    return Estimate(mean, float(low), float(high))


def _require_samples(correct_TN: Sequence[Sequence[bool]], *, at_least: int) -> None:
    if not correct_TN:
        raise ValueError("no task was measured")
    fewest = min(len(correct_N) for correct_N in correct_TN)
    if fewest < at_least:
        raise ValueError(f"a task has {fewest} samples, {at_least} are needed")


def _powers_of_two_and(n: int) -> list[int]:
    """1, 2, 4, ... and n itself, in increasing order."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


ROUNDING = 1e-9
"""Rewards are weighted sums of floats, so equal ones may differ in their last bits. Divided by a standard deviation of
that size, the difference would become a full advantage."""


def has_spread(rewards_G: Sequence[float]) -> bool:
    """Whether max R - min R > 1e-9 max(1, max |R|). If not, no action is known to be better than another.

    False for fewer than two members. NaN and infinities count as spread, so that the check that refuses the step
    receives them.

    >>> has_spread([0.0, 1.0]), has_spread([0.1 + 0.2, 0.3])
    (True, False)
    """
    if len(rewards_G) < 2:
        return False
    if not all(map(math.isfinite, rewards_G)):
        return True
    return max(rewards_G) - min(rewards_G) > ROUNDING * max(1.0, *map(abs, rewards_G))
