"""Tables and the picture of the stability study's real task. stability_report has the verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import table
from benchmarks.stability_pictures import grid
from benchmarks.stability_report import (
    Run,
    chosen,
    has_collapsed,
    has_fallen,
    lowest_after,
    settings,
    spread,
    steps_to,
)
from benchmarks.stability_rules import RULES

VARIANCE = "vitals/split_variance_"
LEARNED = 0.6
COLUMNS = (
    "rule",
    "runs",
    "collapsed",
    "fell",
    "final accuracy",
    f"steps to {LEARNED:.0%}",
    f"lowest after {LEARNED:.0%}",
    "rho",
    "grad norm",
    "largest weight",
    "b - mean",
    "its largest",
    "entropy at the end",
)
BASELINES = ("none", "mean", "opob", "opob_safe")


def tables(runs: Sequence[Run]) -> str:
    """One table a setting, then the estimator's variance under each baseline, on the same batches."""
    parts = []
    for lr, lag in settings(runs):
        rows = [_row(rule, found) for rule in RULES if (found := chosen(runs, rule, lr, lag))]
        steps = "/".join(sorted({str(run["num_steps"]) for run in runs if (run["lr"], run["lag"]) == (lr, lag)}))
        parts.append(f"**Lag {lag}, lr {lr:g}, {steps} steps**\n\n" + table(COLUMNS, rows))
        parts.append(_variances([run for run in runs if (run["lr"], run["lag"]) == (lr, lag)]))
    return "\n".join(parts)


def _row(rule: str, runs: Sequence[Run]) -> list[str]:
    def of_steps(name: str) -> list[list[float]]:
        return [run["steps"][name] for run in runs]

    has_b = RULES[rule].optimum is not None
    return [
        f"`{rule}`",
        str(len(runs)),
        str(sum(map(has_collapsed, runs))),
        str(sum(map(has_fallen, runs))),
        spread([run["accuracy"] for run in runs]),
        spread([steps_to(run, LEARNED) for run in runs], 0),
        spread([lowest_after(run, LEARNED) for run in runs]),
        f"{statistics.median(map(statistics.median, of_steps('ess_ratio'))):.2f}",
        f"{statistics.median(map(statistics.median, of_steps('grad_norm'))):.2f}",
        f"{statistics.median(map(max, of_steps('max_weight'))):.0f}",
        f"{statistics.median(map(statistics.fmean, of_steps('baseline_minus_mean'))):.2f}" if has_b else "",
        spread([max(values) for values in of_steps("baseline_minus_mean_max")]) if has_b else "",
        spread([statistics.fmean(values[-5:]) for values in of_steps("entropy")]),
    ]


def _variances(runs: Sequence[Run]) -> str:
    """Each baseline's variance as a ratio to the mean baseline's on the same batch, by when it was measured."""
    rows = []
    for i in range(max(len(run["variances"]) for run in runs)):
        batches = [run["variances"][i] for run in runs if len(run["variances"]) > i]
        usable = [one for one in batches if all(one.get(VARIANCE + name, 0.0) > 0 for name in BASELINES)]
        if usable:
            ratios = [spread([one[VARIANCE + name] / one[VARIANCE + "mean"] for one in usable]) for name in BASELINES]
            rows.append([str(i + 1), str(len(usable)), *ratios])
    if not rows:
        return ""
    columns = ("measurement of a run", "batches", *(f"{name} / mean" for name in BASELINES))
    return "Variance of the gradient under each baseline, on the same batches:\n\n" + table(columns, rows)


def draw(runs: Sequence[Run], folder: Path) -> Path:
    """Reward by updates made."""

    def curve(run: Run) -> tuple[range, list[float]]:
        rewards = run["curve"]
        return range(len(rewards)), [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]

    return grid(runs, list(RULES), folder / "stability-task.svg", curve=curve, what="reward, mean of 5 steps")
