"""What the parts of a step cost on one machine, and what its tasks are like: the assumptions behind the predictions.

Independent of arms and of how a run is simulated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.asynchrony.waits import median_for, wait_s

GROUPS, MEMBERS = 8, 8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one machine needs for the parts of a step, measured by the calibration. Seconds and core-seconds."""

    learner_step_s: float
    """A step of GROUPS x MEMBERS episodes with all cores and nothing beside it."""
    learner_step_one_core_s: float
    """The same on one core."""
    publish_s: float
    """From the end of a step until the engines hold its weights."""
    episode_core_s: float
    """Core-seconds of engine, sandbox and orchestrator an episode, at full concurrency."""
    episode_alone_s: float
    """Seconds of an episode that plays alone and does not wait."""
    rollout_cores: float
    """Cores that rollouts keep busy at full concurrency."""
    cores: float
    calls: tuple[float, ...]
    """Share of episodes with 0, 1, 2, ... tool calls."""
    equal_share: float
    """Groups of equal rewards, of all that finish."""
    mean_wait_s: float
    """Of an episode, whatever sigma is; 0: the control."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Costs:
        """From a calibration record. `episode_alone_s`, `learner_step_one_core_s`, `rollout_cores` and `cores` may be
        missing: an episode alone then computes on one core, a learner step gains nothing from a second core, rollouts
        use all cores, and there are two."""
        shares = _shares(record)
        cores = float(record.get("cores", 2))
        return cls(
            learner_step_s=record["learner_step_s"],
            learner_step_one_core_s=record.get("learner_step_one_core_s") or record["learner_step_s"],
            publish_s=record["publish_s"],
            episode_core_s=record["episode_core_s"],
            episode_alone_s=record.get("episode_alone_s") or record["episode_core_s"],
            rollout_cores=record.get("rollout_cores") or cores,
            cores=cores,
            calls=tuple(shares.get(calls, 0.0) for calls in range(max(shares) + 1)),
            equal_share=record["equal_share"],
            mean_wait_s=record["mean_wait_s"],
        )

    def learner_cores(self, threads: int) -> float:
        """Cores' worth of work that a learner with so many threads does; 1 with one."""
        return 1.0 if threads == 1 else self.learner_step_one_core_s / self.learner_step_s

    @property
    def mean_calls(self) -> float:
        """Tool calls an episode."""
        return sum(number * share for number, share in enumerate(self.calls)) / sum(self.calls)


def _shares(record: Mapping[str, Any]) -> dict[int, float]:
    """Share of episodes by number of calls; from their mean alone, the two numbers next to it."""
    if "calls" in record:
        return {int(calls): float(share) for calls, share in record["calls"].items()}
    whole = int(record["calls_mean"])
    return {whole: 1 - record["calls_mean"] % 1, whole + 1: record["calls_mean"] % 1}


@functools.lru_cache(maxsize=50_000)
def members_of(task_id: str, costs: Costs, *, sigma: float) -> Sequence[tuple[float, ...]]:
    """The waits of each member of a group, a wait a call: those of the real runs, if members make as many calls."""
    median_s = median_for(costs.mean_wait_s, calls=costs.mean_calls, sigma=sigma)
    members = []
    for member in range(MEMBERS):
        drawn = Random(f"calls/{task_id}/{member}")
        [calls] = drawn.choices(range(len(costs.calls)), weights=costs.calls)
        waits = tuple(wait_s(task_id, member, call, sigma=sigma, median_s=median_s) for call in range(calls))
        members.append(waits)
    return members


def has_equal_rewards(task_id: str, costs: Costs) -> bool:
    """Whether the group of this task teaches nothing; the same in every arm."""
    return Random(f"equal/{task_id}").random() < costs.equal_share
