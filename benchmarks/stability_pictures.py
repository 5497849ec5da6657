"""Pictures of the stability study: reward by lag and rule, and b* before a run fell. SVG by matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stability_report import SETTLED, WINDOW, Run, chosen, has_collapsed, settings
from benchmarks.stability_rules import RULES

SHOWN = ("opob", "opob_safe", "zero", "mean", "tis", "uncorrected", "grpo", "m2po")
EARLY = slice(SETTLED, SETTLED + 40)
"""Steps whose b* the second picture shows."""


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """The two pictures."""
    path = folder / "stability-curves.svg"
    return [
        grid(runs, SHOWN, path, curve=_every_8th, what=f"reward is the mean of {WINDOW} weights in a row"),
        _fates(runs, folder / "stability-fates.svg"),
    ]


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means of WINDOW in a row."""
    return [statistics.fmean(curve[i : i + WINDOW]) for i in range(len(curve) - WINDOW + 1)]


def _every_8th(run: Run) -> tuple[list[int], list[float]]:
    reward = smoothed(run["curve"])[::8]
    return [8 * i for i in range(len(reward))], reward


def grid(
    runs: Sequence[Run],
    rules: Sequence[str],
    path: Path,
    *,
    curve: Callable[[Run], tuple[Sequence[int], Sequence[float]]],
    what: str,
) -> Path:
    """A row a setting, a column a rule that was run, a line a seed. `curve`: a run's updates made, and its rewards."""
    rows = settings(runs)
    rules = [rule for rule in rules if any(chosen(runs, rule, *setting) for setting in rows)]
    figure, axes = pyplot().subplots(
        len(rows),
        len(rules),
        figsize=(1.5 * len(rules), 1.2 * len(rows) + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for (lr, lag), line in zip(rows, axes, strict=True):
        line[0].set_ylabel(f"lag {lag}\nlr {lr:g}")
        for rule, plot in zip(rules, line, strict=True):
            plot.set_ylim(0, 1.02)
            if not (found := chosen(runs, rule, lr, lag)):
                plot.text(0.5, 0.5, "not run", ha="center", transform=plot.transAxes, color="gray")
            for run in found:
                plot.plot(*curve(run), linewidth=0.7, color="C3" if has_collapsed(run) else "C0")
    for rule, plot in zip(rules, axes[0], strict=True):
        plot.set_title(rule.replace("_leave_one_out", "\nleave_one_out"))
    figure.supxlabel(f"updates made; {what}; a line a seed, red: collapsed")
    return saved(figure, path)


def _fates(runs: Sequence[Run], path: Path) -> Path:
    """Highest b* - mean of early steps against the lowest reward of the weights made since; a point a run."""
    figure, plot = pyplot().subplots(figsize=(4.5, 3.2))
    for i, rule in enumerate(name for name, rule in RULES.items() if rule.optimum is not None):
        mine = [run for run in runs if run["rule"] == rule and run["then"] is None and run["lag"] > 0]
        if not mine:
            continue
        shift, lowest = zip(*map(fate, mine), strict=True)
        plot.scatter(shift, lowest, s=9, color=f"C{i}", label=f"{rule} ({len(mine)})")
    plot.set_xlabel(f"highest b* - mean of a step, mean over steps {EARLY.start} to {EARLY.stop}")
    plot.set_ylabel(f"lowest {WINDOW} weights in a row since")
    plot.legend(fontsize=7)
    return saved(figure, path)


def fate(run: Run) -> tuple[float, float]:
    """(mean over EARLY steps of the highest b* - mean, lowest smoothed reward of the weights made since they began)."""
    return statistics.fmean(run["steps"]["shift_max"][EARLY]), min(smoothed(run["curve"][EARLY.start :]))


def pyplot() -> Any:
    """matplotlib's, set for SVG that is the same each time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "stability", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot


def saved(figure: object, path: Path) -> Path:
    """Write a figure as SVG and forget it."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
