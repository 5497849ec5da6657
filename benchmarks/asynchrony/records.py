"""The records of the runs: what each says about time, scores and waste, and ratios of arms over paired seeds.

Independent of tables and pictures. A record is a line of runs.jsonl (run.py writes it).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentrl.errors import DataError
from benchmarks import reporting
from benchmarks.asynchrony.arms import ARMS

Record = Mapping[str, Any]
TARGET = 0.8
"""avg@4 on the 64 held-out tasks, fixed before the first run."""
WARM_UP = 2
"""Steps left out of seconds a step in every arm: caches fill."""
KEY = ("arm", "sigma", "mean_wait_s", "seed", "kind", "real_sleep")
"""What tells one cell's record from another's."""
MAX_ENUMERATED = 6
"""Up to so many seeds every resample is made, instead of RESAMPLES drawn ones."""
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Waits:
    """What the episodes of a cell wait. Ordered: the control without waits first."""

    mean_s: float
    sigma: float

    @classmethod
    def of(cls, cell: Record) -> Waits:
        """Of a record or a predicted cell."""
        mean_s = round(float(cell["mean_wait_s"]), 3)
        return cls(mean_s, float(cell["sigma"]) if mean_s else 0.0)

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}" if self.mean_s else "no wait"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the 2.5 % and 97.5 % points of its resamples."""

    value: float
    low: float
    high: float
    num_seeds: int

    def text(self, digits: int = 2) -> str:
        """`1.52 (1.40 to 1.61)`."""
        if self.num_seeds == 1:
            return f"{self.value:.{digits}f} (one seed)"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def load(path: Path) -> list[dict[str, Any]]:
    """All records; none where the file does not exist. Raises DataError for a line that is no record of an arm."""
    records = reporting.load_runs(path)
    for number, record in enumerate(records, start=1):
        if absent := [name for name in (*KEY, "steps") if name not in record]:
            lost = ", ".join(absent)
            raise DataError(f"{path}: record {number} has no {lost}: remove its line, then make the run again")
        if record["arm"] not in ARMS:
            raise DataError(
                f"{path}: record {number} is of arm {record['arm']!r}, which arms.py does not have: remove its line"
            )
    return records


def chosen(
    records: Iterable[Record],
    *,
    waits: Waits,
    arm: str | None = None,
    kind: str | None = None,
    real_sleep: bool = False,
) -> list[Record]:
    """The records of a cell, by seed."""
    found = [
        record
        for record in records
        if Waits.of(record) == waits
        and bool(record.get("real_sleep")) == real_sleep
        and (arm is None or record["arm"] == arm)
        and (kind is None or record["kind"] == kind)
    ]
    return sorted(found, key=lambda record: record["seed"])


def step_s(record: Record) -> float:
    """Seconds a step on the run's clock, without the first ones (see `warm_up`)."""
    return window_s([step["at_s"] for step in record["steps"]], len(record["steps"]), arm=record["arm"])


def warm_up(arm: str) -> int:
    """Steps that seconds a step leave out.

    An asynchronous arm's first lag + 1 batches are played together before the first step, and then trained one right
    after the other: with them, its steps would be faster than they stay.
    """
    return WARM_UP + int(ARMS[arm].settings["rollout.max_lag"])


def window_s(at_s: Sequence[float], num_steps: int, *, arm: str) -> float:
    """Seconds a step from the end of the warm-up to version `num_steps`. `at_s`: when versions 1, 2, ... were there.

    Raises DataError where the warm-up leaves no step.
    """
    if num_steps <= (first := warm_up(arm)):
        raise DataError(f"a run of {arm} has {num_steps} steps, and its first {first} are not counted: use more")
    return (at_s[num_steps - 1] - at_s[first - 1]) / (num_steps - first)


def useful_step_s(record: Record) -> float | None:
    """Seconds for as many useful groups as a step has; None where the record does not say how many were useful."""
    if ARMS[record["arm"]].replaces:
        return step_s(record)
    if "trained_equal" not in record:
        return None
    equal_share = float(record["trained_equal"]) / float(record["steps"][-1]["groups_trained"])
    return step_s(record) / (1 - equal_share)


def curve(record: Record, start: float | None) -> list[tuple[float, int, float]]:
    """(seconds, version, held-out score), the start first where it is known."""
    at_s = {step["version"]: float(step["at_s"]) for step in record["steps"]}
    points = [(at_s[one["version"]], one["version"], one["avg"]) for one in record.get("scores", []) if one["version"]]
    return [*([(0.0, 0, start)] if start is not None else []), *sorted(points)]


def crossing_s(points: Sequence[tuple[float, int, float]], target: float = TARGET) -> float:
    """Seconds until the score first reaches the target, interpolated; infinite where it does not."""
    for before, after in itertools.pairwise(points):
        if after[2] >= target > before[2]:
            share = (target - before[2]) / (after[2] - before[2])
            return before[0] + (after[0] - before[0]) * share
    return points[0][0] if points and points[0][2] >= target else math.inf


def score_at(points: Sequence[tuple[float, int, float]], at: float, *, axis: int = 0) -> float | None:
    """The score at a time (axis 0) or a version (axis 1), interpolated; None before the first point and after the
    last."""
    for before, after in itertools.pairwise(points):
        if before[axis] <= at <= after[axis]:
            return before[2] + (after[2] - before[2]) * (at - before[axis]) / (after[axis] - before[axis])
    return None


def by_seed(records: Iterable[Record], value: Callable[[Record], float | None]) -> dict[str, dict[int, float]]:
    """arm: seed: value, without those that are None. Of several records of a seed the last counts."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if (seconds := value(record)) is not None:
            found.setdefault(record["arm"], {})[record["seed"]] = seconds
    return found


def common_seeds(values: Mapping[str, Mapping[int, float]], arms: Iterable[str]) -> list[int]:
    """Seeds that each of these arms has."""
    return sorted(set.intersection(*(set(values[arm]) for arm in arms)))


def synchronous(values: Mapping[str, Mapping[int, float]]) -> list[str]:
    """The synchronous arms among them."""
    return [arm for arm in values if ARMS[arm].is_synchronous]


def best_synchronous(values: Mapping[str, Mapping[int, float]]) -> str | None:
    """The synchronous arm with the least mean over the seeds that all of them have; None without any."""
    arms = synchronous(values)
    if not arms or not (seeds := common_seeds(values, arms)):
        return None
    return min(arms, key=lambda arm: statistics.fmean(values[arm][seed] for seed in seeds))


def ratio(values: Mapping[str, Mapping[int, float]], arm: str) -> Interval | None:
    """Seconds of the best synchronous arm / those of `arm`, over the seeds that they all have.

    The best is chosen anew in each resample of seeds, so that the choice is part of the interval. None without common
    seeds, or where `arm` or every synchronous arm has a seed without an end.
    """
    rivals = synchronous(values)
    if arm not in values or not rivals or not (seeds := common_seeds(values, {*rivals, arm})):
        return None

    def of(drawn: Sequence[int]) -> float:
        best = min(statistics.fmean(values[rival][seed] for seed in drawn) for rival in rivals)
        return best / statistics.fmean(values[arm][seed] for seed in drawn)

    value = of(seeds)
    if not math.isfinite(value) or value == 0:
        return None
    return interval(value, [of(drawn) for drawn in resamples(seeds)], len(seeds))


def mean(values: Sequence[float]) -> Interval | None:
    """The mean over seeds; None without any, or where one is infinite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return interval(statistics.fmean(values), [statistics.fmean(drawn) for drawn in resamples(values)], len(values))


def interval(value: float, resampled: Iterable[float], num_seeds: int) -> Interval:
    """`value`, and the middle 95 % of its resamples, by the nearest rank."""
    ordered = sorted(resampled)
    last = len(ordered) - 1
    return Interval(value, ordered[math.floor(0.025 * last)], ordered[math.ceil(0.975 * last)], num_seeds)


def resamples(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Draws with replacement, as many as there are items: all of them for few items."""
    if len(items) <= MAX_ENUMERATED:
        return itertools.product(items, repeat=len(items))
    drawn = Random(len(items))
    return (drawn.choices(items, k=len(items)) for _ in range(RESAMPLES))
