"""Pictures of the report: speed-up by waits, score against time, predicted against measured. SVG by matplotlib.

Backgrounds are transparent, and text and lines have colours that are legible on white and on black.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.asynchrony import records as of
from benchmarks.asynchrony.arms import ARMS
from benchmarks.asynchrony.records import TARGET, Waits
from benchmarks.asynchrony.tables import Study, prediction_s

INK = "#787878"
COLOURS: Mapping[str, str] = {
    "S1r": "#9a6fb0",
    "A1": "#c98b1b",
    "A2": "#e0632c",
    "A4": "#2f8fd8",
    "A8": "#2ba079",
    "P1": "#cf5a93",
    "P2": "#8a8f2a",
    "P2off": "#b0553f",
}
LINES = ("A1", "A2", "A4", "A8")
"""Arms of the first picture."""
GOAL = 2.5


def speedup(study: Study, path: Path) -> Path | None:
    """Times as fast as the best synchronous arm: measured with intervals, predicted dashed. None without any number."""
    waits = study.all_waits
    found_by = (_measured, _by_groups, _expected)
    columns = [arm for arm in LINES if any(found(study, one, arm) for one in waits for found in found_by)]
    if not columns:
        return None
    pyplot = _pyplot()
    figure, plot = pyplot.subplots(figsize=(6.8, 3.4))
    for index, arm in enumerate(columns):
        shift = 0.09 * (index - (len(columns) - 1) / 2)
        points = [(x + shift, ratio) for x, one in enumerate(waits) if (ratio := _measured(study, one, arm))]
        hollow = [(x + shift, ratio) for x, one in enumerate(waits) if (ratio := _by_groups(study, one, arm))]
        dashed = [(at + shift, value) for at, one in enumerate(waits) if (value := _expected(study, one, arm))]
        if dashed:
            plot.plot(*zip(*dashed, strict=True), color=COLOURS[arm], linewidth=1, linestyle=(0, (4, 3)), alpha=0.8)
        if points:
            _errorbar(plot, points, color=COLOURS[arm], linewidth=1.6)
        if hollow:
            _errorbar(plot, hollow, color=COLOURS[arm], linestyle="none", markerfacecolor="none")
        plot.plot([], [], color=COLOURS[arm], marker="o", markersize=4.5, label=f"{arm}: {_about(arm)}")
    plot.plot([], [], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="predicted before the runs")
    if any(_by_groups(study, one, arm) for one in waits for arm in columns):
        style = {"linestyle": "none", "marker": "o", "markersize": 4.5, "markerfacecolor": "none"}
        plot.plot([], [], color=INK, label="hollow: useful groups an hour", **style)
    plot.axhline(1, color=INK, linewidth=0.8)
    plot.axhline(GOAL, color=INK, linewidth=0.8, linestyle=":")
    for height, text in ((GOAL, f"goal: {GOAL:g}"), (1, "best\nsynchronous")):
        plot.text(len(waits) - 0.5, height, text, color=INK, va="center", fontsize=8)
    plot.set_xticks(range(len(waits)), [_label(one) for one in waits])
    plot.set_xlim(-0.45, len(waits) - 0.55)
    plot.set_ylim(bottom=0)
    plot.set_ylabel(f"times as fast to a score of {TARGET}")
    _legend_below(figure, plot, columns=3)
    return _saved(figure, path)


def scores(study: Study, path: Path, *, waits: Waits | None = None) -> Path | None:
    """Held-out score against time: the best synchronous arm, the naive one, and A2, A4, A8; a thin line a seed."""
    waits = waits or max((one for one in study.waits if study.to_target(one)), default=None, key=_weight)
    if waits is None:
        return None
    best = of.best_synchronous(study.to_target(waits))
    shown = [arm for arm in dict.fromkeys(("S1r", best, "A2", "A4", "A8")) if arm]
    curves = {
        arm: [
            of.curve(record, study.start_score) for record in of.chosen(study.runs, waits=waits, arm=arm, kind="score")
        ]
        for arm in shown
    }
    if not any(curves.values()):
        return None
    pyplot = _pyplot()
    figure, plot = pyplot.subplots(figsize=(6.4, 3.2))
    for arm, runs in curves.items():
        colour = COLOURS.get(arm, "#6c6cd0")
        for points in runs:
            plot.plot([p[0] for p in points], [p[2] for p in points], color=colour, linewidth=0.7, alpha=0.45)
        if middle := _mean_curve(runs):
            about = _about(arm) + (", the best synchronous" if arm == best else "")
            style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.8}
            plot.plot(*zip(*middle, strict=True), label=f"{arm}: {about}", **style)
    plot.axhline(TARGET, color=INK, linewidth=0.8, linestyle=":")
    plot.set_xlim(left=0)
    plot.set_xlabel(f"seconds of training, waits {waits}; a thin line a seed")
    plot.set_ylabel("held-out score (avg@4)")
    _legend_below(figure, plot, columns=2)
    return _saved(figure, path)


def predicted(study: Study, path: Path) -> Path | None:
    """Seconds a step, predicted by the simulation against measured: a point an arm and distribution of waits."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for waits in study.waits:
        for arm in ARMS:
            found, cell = of.chosen(study.runs, waits=waits, arm=arm), study.predicted(waits, arm)
            if found and cell:
                measured = statistics.fmean(of.step_s(record) for record in found)
                groups.setdefault(_kind(arm), []).append((prediction_s(cell, found), measured))
    if not groups:
        return None
    pyplot = _pyplot()
    figure, plot = pyplot.subplots(figsize=(4.6, 3.6))
    every = [value for points in groups.values() for point in points for value in point]
    ends = (0.8 * min(every), 1.25 * max(every))
    plot.plot(ends, ends, color=INK, linewidth=0.8)
    plot.fill_between(
        ends, [0.8 * end for end in ends], [1.25 * end for end in ends], color=INK, alpha=0.15, linewidth=0
    )
    colours = {"synchronous": "#9a6fb0", "asynchronous": "#2f8fd8", "others' rules": "#c98b1b"}
    for kind, points in groups.items():
        plot.scatter(*zip(*points, strict=True), s=16, color=colours[kind], label=kind, zorder=3)
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    plot.set_xscale("log")
    plot.set_yscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if ends[0] <= tick <= ends[1]]
    plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    plot.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    plot.minorticks_off()
    plot.set_xlim(ends)
    plot.set_ylim(ends)
    plot.set_xlabel("seconds a step, predicted; band: a factor of 1.25")
    plot.set_ylabel("seconds a step, measured")
    _legend_below(figure, plot, columns=3)
    return _saved(figure, path)


def _measured(study: Study, waits: Waits, arm: str) -> of.Interval | None:
    return of.ratio(study.to_target(waits), arm)


def _by_groups(study: Study, waits: Waits, arm: str) -> of.Interval | None:
    """The ratio of useful groups an hour, where no run was measured until the score."""
    return None if study.to_target(waits) else of.ratio(study.a_useful_step(waits), arm)


def _errorbar(plot: Any, points: Sequence[tuple[float, of.Interval]], **style: Any) -> None:
    values = [found.value for _, found in points]
    below = [max(0.0, found.value - found.low) for _, found in points]
    above = [max(0.0, found.high - found.value) for _, found in points]
    style |= {"marker": "o", "markersize": 4.5, "capsize": 2.5}
    plot.errorbar([at for at, _ in points], values, yerr=[below, above], **style)


def _expected(study: Study, waits: Waits, arm: str) -> float | None:
    return study.predicted_ratio(waits, arm)


def _mean_curve(runs: Sequence[Sequence[tuple[float, int, float]]]) -> list[tuple[float, float]]:
    """Mean time and mean score of each version that all runs have."""
    versions = sorted(set.intersection(*({point[1] for point in points} for points in runs))) if runs else []
    at = [{point[1]: point for point in points} for points in runs]
    return [(statistics.fmean(one[v][0] for one in at), statistics.fmean(one[v][2] for one in at)) for v in versions]


def _weight(waits: Waits) -> tuple[bool, float]:
    """Sigma 1 first, where the goal was set; then the larger."""
    return waits.sigma == 1.0, waits.sigma


def _about(arm: str) -> str:
    """A few words for a legend."""
    lag = ARMS[arm].settings.get("rollout.max_lag")
    names = {"S1": "synchronous", "S2": "split cores", "S3": "streaming", "S4": "tail batching"}
    if (kind := arm[:2]) in names:
        return names[kind] + (", replaced" if arm.endswith("r") else "")
    return f"lag {lag}"


def _label(waits: Waits) -> str:
    return str(waits).replace("sigma 0", "sigma 0\n(all equal)") if waits.sigma == 0 else str(waits)


def _kind(arm: str) -> str:
    return {"S": "synchronous", "A": "asynchronous"}.get(arm[0], "others' rules")


def _pyplot() -> Any:
    """Set for SVG that is the same each time, without a background."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    inks: Any = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    matplotlib.rcParams.update(
        {
            **dict.fromkeys(inks, INK),
            "svg.hashsalt": "asynchrony",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
        }
    )
    return pyplot


def _legend_below(figure: Any, plot: Any, *, columns: int) -> None:
    handles, labels = plot.get_legend_handles_labels()
    rows = -(-len(labels) // columns)
    figure.tight_layout(rect=(0, 0.065 * rows + 0.01, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=8, handlelength=1.6)


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
