"""Pictures of stale data on the quickstart's task: how every run ended, and its reward by updates made. SVG.

They show any part of the sweep; what has not been run is left empty.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.stability_pictures import grid, pyplot, saved
from benchmarks.stability_report import Run, has_collapsed
from benchmarks.stability_task_rules import DEFAULT_RULES, ON_POLICY_TWINS

LABELS = {
    "opob_safe": "vcpo_safe (default)",
    "opob_safe_leave_one_out": "the same, leave one out",
    "vcpo_published": "vcpo_published",
    "opob_paper": "vcpo",
    "opob_leave_one_out": "b* of the others",
    "mean": "mean, ESS step",
    "tis": "TIS",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "uncorrected": "no correction",
    "zero": "no baseline",
    "zero_dropped": "no baseline, no equal groups",
}
"""Names of the rules in the first picture, in its order from above."""
NAME = "stability-task"


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """How the runs ended; then a picture a lag: a row a rate, a column a rule, a line a seed."""
    usual = [run for run in runs if run["reward"] == "0/1"]
    pictures = [_ends(usual, folder / f"{NAME}.svg")]
    for lag in sorted({run["lag"] for run in usual}):
        here = [run for run in usual if run["lag"] == lag]
        path = folder / f"{NAME}-lag{lag}.svg"
        pictures.append(grid(here, DEFAULT_RULES, path, curve=_smooth, what="reward, mean of 5 steps"))
    return pictures


def _smooth(run: Run) -> tuple[range, list[float]]:
    rewards = run["curve"]
    means = [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    return range(0, len(means), 2), means[::2]


def _ends(runs: Sequence[Run], path: Path) -> Path:
    """A panel a lag, a line a rule, a mark a run at its final accuracy; a bar at the mean of the runs of one rate."""
    lags, rates = sorted({run["lag"] for run in runs}), sorted({run["lr"] for run in runs})
    figure, axes = pyplot().subplots(1, len(lags), figsize=(2.6 + 1.6 * len(lags), 3.5), sharey=True, squeeze=False)
    for lag, plot in zip(lags, axes[0], strict=True):
        plot.set_title(f"lag {lag}")
        plot.set_xlim(-0.04, 1.04)
        plot.grid(axis="y", linewidth=0.3)
        plot.tick_params(axis="y", length=0)
        for line, rule in enumerate(LABELS):
            if not lag and rule in ON_POLICY_TWINS:
                plot.text(0.5, line, f"as {LABELS[ON_POLICY_TWINS[rule]]}", ha="center", va="center", color="gray")
            for i, lr in enumerate(rates):
                found = [run for run in runs if (run["lag"], run["lr"], run["rule"]) == (lag, lr, rule)]
                _marks(plot, found, line + 0.36 * (i - (len(rates) - 1) / 2), color=f"C{i}")
    axes[0][0].set_yticks(range(len(LABELS)), LABELS.values())
    axes[0][0].invert_yaxis()
    colors = ", ".join(f"{name}: lr {lr:g}" for name, lr in zip(("blue", "orange", "green"), rates, strict=False))
    figure.supxlabel(f"accuracy on held-out problems at the end\n{colors}; a mark a run, x: collapsed, bar: mean")
    return saved(figure, path)


def _marks(plot: Any, runs: Sequence[Run], height: float, *, color: str) -> None:
    if not runs:
        return
    plot.plot([statistics.fmean(run["accuracy"] for run in runs)], [height], marker="|", color=color, markersize=7)
    for run in runs:
        marker = "x" if has_collapsed(run) else "o"
        plot.plot([run["accuracy"]], [height], marker=marker, color=color, markersize=3, linestyle="none")
