"""The rows of benchmarks/staleness_sim.py as a table and a picture. Simulates nothing.

python -m benchmarks.staleness_report benchmarks/staleness_sim.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import reporting
from benchmarks.staleness_sim import Row
from benchmarks.staleness_stores import RULES

COLUMNS = (
    *("rule", "k", "steps an hour", "learner idle", "engines busy", "mean lag", "largest lag", "trained older than k"),
    *("dropped as too old", "length of the dropped", "length of the trained"),
)
NOTE = """\
A length is a group's longest episode, as a multiple of the mean over all groups that finished with signal: below 1 the
learner sees the short ones. Groups that `tail` cancelled are not in that mean. `capacity` is AReaL's admission rule
without a check at consumption (see the module).
"""


def cells(row: Row) -> list[object]:
    """One line of the table."""
    return [
        row.rule,
        f"{row.max_lag:g}",
        f"{row.steps_per_hour:.1f}",
        f"{100 * row.learner_idle:.0f} %",
        f"{100 * row.engines_busy:.0f} %",
        f"{row.mean_lag:.2f}",
        row.largest_lag,
        f"{100 * row.too_old:.1f} %",
        f"{100 * row.dropped:.1f} %",
        "-" if row.dropped_length is None else f"{row.dropped_length:.2f}",
        f"{row.trained_length:.3f}",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput, lag and length bias against k, a line a rule. SVG by matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "staleness", "font.size": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 3, figsize=(9, 2.8))
    lags = sorted({row.max_lag for row in rows})
    for plot, title in zip(plots, ("steps an hour", "largest lag trained", "length of the trained"), strict=True):
        plot.set_title(title)
        plot.set_xlabel("k")
        plot.set_xticks(range(len(lags)), [f"{lag:g}" for lag in lags])
    for rule in RULES:
        found = sorted((row for row in rows if row.rule == rule), key=lambda row: row.max_lag)
        at = [lags.index(row.max_lag) for row in found]
        style = {"marker": "o", "markersize": 3, "linewidth": 1, "linestyle": "--" if rule == "capacity" else "-"}
        plots[0].plot(at, [row.steps_per_hour for row in found], label=rule, **style)
        plots[1].plot(at, [row.largest_lag for row in found], **style)
        plots[2].plot(at, [row.trained_length for row in found], **style)
    plots[1].plot(range(len(lags)), lags, color="gray", linewidth=0.5)
    figure.legend(loc="lower center", ncol=len(RULES), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Write FILE.md and FILE.svg beside FILE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results: Path = parser.parse_args(argv).results
    kept = json.loads(results.read_text())
    rows = [Row(**row) for row in kept["rows"]]
    world = ", ".join(f"{name} {value}" for name, value in kept["settings"]["world"].items())
    table = reporting.table(COLUMNS, [cells(row) for row in rows])
    picture = results.with_suffix(".svg")
    draw(rows, picture)
    text = f"{kept['head']}- world: {world}\n\n{NOTE}\n{table}\n![against k]({picture.name})\n"
    results.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
