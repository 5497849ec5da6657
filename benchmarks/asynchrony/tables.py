"""Tables of the report: each function makes one, of the records there are. A cell that was not measured is a dash.

Independent of pictures, pages and files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import reporting
from benchmarks.asynchrony import records as of
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.records import TARGET, Interval, Record, Waits

MISSING = "-"
EPISODES_A_STEP = 64
HEADLINE = ("A1", "A2", "A4", "A8", "P1", "P2")
"""Arms of the first table."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that a report is made of. Example: `Study(runs=records.load(RUNS))`."""

    runs: Sequence[Record]
    predictions: Mapping[str, Any] = field(default_factory=dict)
    """Of predict.py; empty where there are none."""
    start_score: float | None = None

    @property
    def waits(self) -> list[Waits]:
        """Of all cells that were measured."""
        return sorted({Waits.of(record) for record in self.runs})

    @property
    def all_waits(self) -> list[Waits]:
        """Of all cells that were measured or predicted."""
        return sorted({*self.waits, *(Waits.of(cell) for cell in self.predictions.get("cells", []))})

    def to_target(self, waits: Waits) -> dict[str, dict[int, float]]:
        """arm: seed: seconds to the target, infinite where a run did not reach it."""
        scored = [record for record in of.chosen(self.runs, waits=waits, kind="score") if record.get("scores")]
        return of.by_seed(scored, lambda record: of.crossing_s(of.curve(record, self.start_score)))

    def a_useful_step(self, waits: Waits) -> dict[str, dict[int, float]]:
        """arm: seed: seconds for as many useful groups as a step has."""
        return of.by_seed(of.chosen(self.runs, waits=waits), of.useful_step_s)

    def a_step(self, waits: Waits) -> dict[str, dict[int, float]]:
        """arm: seed: seconds a step."""
        return of.by_seed(of.chosen(self.runs, waits=waits), of.step_s)

    def predicted(self, waits: Waits, arm: str) -> Mapping[str, Any] | None:
        """The predicted cell."""
        cells = self.predictions.get("cells", [])
        return next((cell for cell in cells if Waits.of(cell) == waits and cell["arm"] == arm), None)

    def predicted_ratio(
        self, waits: Waits, arm: str, value: Callable[[Mapping[str, Any]], float | None] | None = None
    ) -> float | None:
        """Predicted seconds of the best synchronous arm / those of `arm`; None where one has none.

        Args:
            value: seconds of a predicted cell; those to the target unless given.
        """
        found = {name: cell for name in ARMS if (cell := self.predicted(waits, name))}
        value = value or target_s
        seconds = {name: seconds for name, cell in found.items() if (seconds := value(cell)) is not None}
        rivals = of.synchronous({name: {} for name in seconds})
        return min(seconds[rival] for rival in rivals) / seconds[arm] if arm in seconds and rivals else None

    def open_rivals(self, waits: Waits) -> list[str]:
        """Synchronous arms that may be better than the best one: without a scored run under these waits, or with runs
        that ended without the target so early that nothing follows from it."""
        seconds = self.to_target(waits)
        best = of.best_synchronous(seconds)
        least_s = statistics.fmean(seconds[best].values()) if best else math.inf
        ends_s = of.by_seed(of.chosen(self.runs, waits=waits, kind="score"), lambda record: record["steps"][-1]["at_s"])

        def is_open(arm: str) -> bool:
            if math.inf not in seconds.get(arm, {0: math.inf}).values():
                return False
            return arm not in seconds or least_s > statistics.fmean(
                min(reached_s, ends_s[arm][seed]) for seed, reached_s in seconds[arm].items()
            )

        return [arm.name for arm in ARMS.values() if arm.is_synchronous and is_open(arm.name)]


def headline(study: Study) -> str:
    """Ratios of times to the target against the best synchronous arm, a row a distribution of waits."""
    rows = []
    for waits in study.waits:
        seconds = study.to_target(waits)
        best = of.best_synchronous(seconds)
        if best is None:
            continue
        least_s = of.mean(list(seconds[best].values()))
        told = "none reached it" if least_s is None else f"{best}, {least_s.text(0)} s"
        ratios = [_text(of.ratio(seconds, arm)) for arm in HEADLINE]
        rows.append([str(waits), told, *ratios])
    return reporting.table(["waits", f"best synchronous arm, time to {TARGET}", *HEADLINE], rows) if rows else ""


def arms(study: Study, waits: Waits) -> str:
    """Every arm under these waits."""
    seconds, useful, steps = study.to_target(waits), study.a_useful_step(waits), study.a_step(waits)
    curves = _curves(study, waits)
    version, at_s = _equal_samples(curves), _equal_time(seconds)
    rows = []
    for arm in ARMS:
        if arm not in steps:
            continue
        reached = seconds.get(arm, {})
        rows.append(
            [
                arm,
                len(steps[arm]),
                _text(of.ratio(seconds, arm)),
                _text(of.mean(list(reached.values())), digits=0),
                f"{sum(map(math.isfinite, reached.values()))} of {len(reached)}" if reached else MISSING,
                f"{3600 / statistics.fmean(steps[arm].values()):.0f}",
                f"{8 * 3600 / statistics.fmean(useful[arm].values()):.0f}" if arm in useful else MISSING,
                _text(of.ratio(useful, arm)),
                _number(
                    _mean(of.score_at(points, version, axis=1) for points in curves.get(arm, [])) if version else None
                ),
                _number(_mean(_score_by(points, at_s) for points in curves.get(arm, [])) if at_s else None),
            ]
        )
    samples = f"score after {version} steps" if version else "score at equal samples"
    time = f"score at {at_s:.0f} s" if at_s else "score at equal time"
    columns = ("arm", "seeds", "times as fast to the score", f"seconds to {TARGET}", "reached", "steps an hour")
    return reporting.table([*columns, "useful groups an hour", "times as many", samples, time], rows) if rows else ""


def waste(study: Study, waits: Waits) -> str:
    """Where seconds, cores, tokens and groups went; means over seeds."""
    rows = []
    for arm, found in _by_arm(study, waits):
        last = [record["steps"][-1] for record in found]
        groups = sum(step["groups_trained"] + step["groups_equal"] + step["groups_stale"] for step in last)
        generated = sum(step["generated"] for step in last)
        rows.append(
            [
                arm,
                _share(statistics.fmean(_learner_busy(record) for record in found)),
                _share(statistics.fmean(step["engine_busy_s"] / step["at_s"] for step in last)),
                f"{statistics.fmean(_core_s(record) / record['steps'][-1]['version'] for record in found):.2f}",
                f"{generated / sum(step['version'] for step in last):.0f}",
                _share(sum(record["trained_tokens"] for record in found) / generated),
                _share(sum(step["groups_equal"] for step in last) / groups),
                _share(sum(step["groups_stale"] for step in last) / groups),
                f"{statistics.fmean(step['lag_mean'] for record in found for step in record['steps']):.2f}",
                f"{max(step['lag_max'] for record in found for step in record['steps']):.0f}",
            ]
        )
    columns = ["arm", "learner busy", "engine busy", "core-seconds a step", "tokens a step", "of them trained"]
    return (
        reporting.table([*columns, "groups equal", "groups too old", "mean lag", "largest lag"], rows) if rows else ""
    )


def selection(study: Study, waits: Waits) -> str:
    """Whether what is trained is shorter than what is played: nothing may be dropped unseen."""
    rows = []
    for arm, found in _by_arm(study, waits):
        trained, played = (_mean(record[name] for record in found) for name in ("trained_waits_s", "finished_waits_s"))
        stale = [step["stale_tokens_mean"] for record in found for step in record["steps"] if step["stale_tokens_mean"]]
        rows.append(
            [
                arm,
                _number(played),
                _number(trained),
                _number(trained / played if trained and played else None),
                _number(_mean(record["trained_tokens_mean"] for record in found), digits=1),
                _number(_mean(stale), digits=1),
            ]
        )
    waited = ["mean wait of finished episodes, s", "of trained ones, s", "trained / finished"]
    return (
        reporting.table(["arm", *waited, "tokens of a trained episode", "tokens of one too old"], rows) if rows else ""
    )


def predicted(study: Study, waits: Waits) -> str:
    """Seconds a step and ratios, as predicted before and as measured; without a prediction, no table."""
    rows, seconds = [], study.to_target(waits)
    for arm in ARMS:
        cell, found = study.predicted(waits, arm), of.chosen(study.runs, waits=waits, arm=arm)
        if cell is None:
            continue
        simulated = prediction_s(cell, found)
        measured = statistics.fmean(of.step_s(record) for record in found) if found else None
        rows.append(
            [
                arm,
                _number(cell["formula_step_s"]),
                _number(simulated),
                _number(measured),
                _number(measured / simulated if measured else None),
                _number(target_s(cell), digits=0),
                _text(of.mean(list(seconds.get(arm, {}).values())), digits=0),
                _number(study.predicted_ratio(waits, arm)),
                _text(of.ratio(seconds, arm)),
            ]
        )
    step = ["s a step by the formula", "by the simulation", "measured", "measured / simulated"]
    target = [f"s to {TARGET} predicted", "measured", "ratio to the best synchronous arm predicted", "measured"]
    if not rows:
        return ""
    limit = study.predictions.get("limits", {}).get(f"{waits.sigma:g}" if waits.mean_s else "no wait")
    bound = f"\nS = (E[longest] + train + sync) / max(train + sync, work / cores): {_number(limit)}.\n"
    return reporting.table(["arm", *step, *target], rows) + (bound if limit is not None else "")


def target_s(cell: Mapping[str, Any]) -> float | None:
    """Predicted seconds to the target, the mean over seeds; None where one does not reach it."""
    seconds = cell["to_target_s"]
    return None if not seconds or None in seconds else statistics.fmean(seconds)


def useful_step_s(cell: Mapping[str, Any]) -> float | None:
    """Predicted seconds for as many useful groups as a step has; None where the cell has no such numbers."""
    return 8 * cell["step_s"] / cell["useful_a_step"] if cell.get("useful_a_step") else None


def prediction_s(cell: Mapping[str, Any], found: Sequence[Record]) -> float:
    """Predicted seconds a step, over the steps that these records have where there are any."""
    num_steps = min([len(cell["at_s"]), *(len(record["steps"]) for record in found)])
    return of.window_s(cell["at_s"], num_steps, arm=cell["arm"])


def errors(study: Study) -> list[float]:
    """By what factor, at least 1, predicted and measured seconds a step differ in each cell."""
    factors = []
    for waits in study.waits:
        for arm, found in _by_arm(study, waits):
            if cell := study.predicted(waits, arm):
                factor = statistics.fmean(of.step_s(record) for record in found) / prediction_s(cell, found)
                factors.append(max(factor, 1 / factor))
    return factors


def clock(study: Study) -> str:
    """Cells measured with real sleeps beside the same cells on the skipping clock."""
    rows = []
    for record in study.runs:
        if not record.get("real_sleep"):
            continue
        waits = Waits.of(record)
        same = of.chosen(study.runs, waits=waits, arm=record["arm"])
        skipped = [of.step_s(one) for one in same if one["seed"] == record["seed"]] or [of.step_s(one) for one in same]
        slept = of.step_s(record)
        ratio = slept / statistics.fmean(skipped) if skipped else None
        rows.append([record["arm"], waits, record["seed"], _number(slept), _number(_mean(skipped)), _number(ratio)])
    columns = ["arm", "waits", "seed", "s a step, every second slept", "on the skipping clock", "ratio"]
    return reporting.table(columns, rows) if rows else ""


def missing(study: Study, waits: Sequence[Waits], seeds: Sequence[int]) -> list[str]:
    """Arm, waits and seeds of the cells that have no record."""
    lines = []
    for one in waits:
        steps = study.a_step(one)
        gaps = {arm: [seed for seed in seeds if seed not in steps.get(arm, {})] for arm in ARMS}
        if found := [f"{arm} ({', '.join(map(str, lost))})" for arm, lost in gaps.items() if lost]:
            lines.append(f"{one}: {', '.join(found)}")
    return lines


def _by_arm(study: Study, waits: Waits) -> list[tuple[str, list[Record]]]:
    found = [(arm, of.chosen(study.runs, waits=waits, arm=arm)) for arm in ARMS]
    return [(arm, records) for arm, records in found if records]


def _curves(study: Study, waits: Waits) -> dict[str, list[list[tuple[float, int, float]]]]:
    found: dict[str, list[list[tuple[float, int, float]]]] = {}
    for record in of.chosen(study.runs, waits=waits, kind="score"):
        if record.get("scores"):
            found.setdefault(record["arm"], []).append(of.curve(record, study.start_score))
    return found


def _equal_samples(curves: Mapping[str, Sequence[Sequence[tuple[float, int, float]]]]) -> int | None:
    """The newest version up to which every run has scores."""
    return min((points[-1][1] for runs in curves.values() for points in runs), default=None)


def _equal_time(seconds: Mapping[str, Mapping[int, float]]) -> float | None:
    """Mean seconds of the arm that reaches the target first."""
    means = [statistics.fmean(values.values()) for values in seconds.values()]
    least = min(means, default=math.inf)
    return least if math.isfinite(least) else None


def _score_by(points: Sequence[tuple[float, int, float]], at_s: float) -> float | None:
    """The score at a time; a run that had reached the target and was not scored further keeps its last."""
    return points[-1][2] if at_s > points[-1][0] else of.score_at(points, at_s)


def _learner_busy(record: Record) -> float:
    """Share of the clock in which the learner computed or published."""
    steps = record["steps"]
    return float(sum(step["learner_step_s"] + step["publish_s"] for step in steps) / steps[-1]["at_s"])


def _core_s(record: Record) -> float:
    return float(sum(seconds for part, seconds in record["core_s"].items() if part != "others"))


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _text(value: Interval | None, digits: int = 2) -> str:
    return MISSING if value is None else value.text(digits)


def _number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


PER_WAITS: Mapping[str, Callable[[Study, Waits], str]] = {
    "arms": arms,
    "waste": waste,
    "selection": selection,
    "predicted": predicted,
}
"""Tables that there is one of for each distribution of waits."""
