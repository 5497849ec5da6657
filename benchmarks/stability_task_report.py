"""Tables of stale data on the quickstart's task. stability_report has the verdicts.

It works on any part of the sweep: what has not been run is shown as missing. Pictures: stability_task_pictures.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from agentrl.config.presets import OPTIMAL
from benchmarks.reporting import interval, table
from benchmarks.stability_report import Run, has_collapsed, has_fallen, lowest_after, spread, steps_to
from benchmarks.stability_task_rules import ABOUT, DEFAULT_RULES, ON_POLICY_TWINS, SHIPPED, TASK_RULES
from benchmarks.stability_task_steps import VARIANCE

LEARNED = 0.6
COLUMNS = (
    "rule",
    "runs",
    "final accuracy",
    f"minus `{SHIPPED}`",
    "collapsed",
    "fell",
    "reward of all weights",
    f"steps to {LEARNED:.0%}",
    f"lowest after {LEARNED:.0%}",
    "rho",
    "grad norm",
    "largest weight",
    "b - mean",
    "its largest",
    "entropy at the end",
)
MIDDLE, MEAN, LARGEST = range(3)
"""Places in a run's `over_steps`."""
Cell = tuple[str, int, float]
"""Rewards, lag, learning rate."""


def page(runs: Sequence[Run]) -> str:
    """The report."""
    rules = [rule for rule in DEFAULT_RULES if any(run["rule"] == rule for run in runs)]
    rules += [rule for rule in TASK_RULES if rule not in rules and any(run["rule"] == rule for run in runs)]
    parts = [_head(runs), _summary(runs, rules)]
    for cell in cells(runs):
        reward, lag, lr = cell
        here = _at(runs, cell)
        rows = [_row(rule, found, here) for rule in rules if (found := _of(here, rule))]
        steps = "/".join(sorted({str(run["num_steps"]) for run in here}))
        title = f"## Lag {lag}, lr {lr:g}, rewards {reward}, {steps} steps\n\n"
        parts.append(title + table(COLUMNS, rows) + _variances(here))
    return "\n".join(parts)


def cells(runs: Sequence[Run]) -> list[Cell]:
    """The settings that occur: the usual rewards, the longest lag and the highest rate first."""
    found = {(run["reward"], run["lag"], run["lr"]) for run in runs}
    return sorted(found, key=lambda cell: (cell[0] != "0/1", cell[0], -cell[1], -cell[2]))


def _at(runs: Sequence[Run], cell: Cell) -> list[Run]:
    return [run for run in runs if (run["reward"], run["lag"], run["lr"]) == cell]


def _of(runs: Sequence[Run], rule: str) -> list[Run]:
    return [run for run in runs if run["rule"] == rule]


def _head(runs: Sequence[Run]) -> str:
    def all_of(name: str) -> str:
        return "; ".join(sorted({str(run[name]).split("; load")[0] for run in runs}))

    dates = sorted(run["date"] for run in runs)
    lines = [
        "# Stale data on the quickstart's task",
        "",
        f"- date: {dates[0]} to {dates[-1]}" if dates else "- no run yet",
        f"- commit: {all_of('commit')}",
        f"- machine: {all_of('machine')}",
        f"- {len(runs)} runs, a step is 8 tasks x 8 episodes; `python -m benchmarks.stability_task`",
        "- final accuracy: 64 held-out problems x 4; mean over seeds with its bootstrap interval in brackets (95 %,",
        "  resampled from so few seeds narrower than it should be)",
        f"- minus `{SHIPPED}`: the mean difference in pairs of the same seed, with its interval",
        "- collapsed, fell: benchmarks/stability.py; a run whose weights became NaN counts as collapsed",
        "- what was expected before: stability_task_predictions.md",
        "- at lag 0 " + ", ".join(f"`{one}` equals `{other}`" for one, other in ON_POLICY_TWINS.items()),
        "",
    ]
    described = [f"- `{name}`: {ABOUT[name]}" for name in DEFAULT_RULES]
    return "\n".join([*lines, *described, ""])


def _summary(runs: Sequence[Run], rules: Sequence[str]) -> str:
    """Final accuracy of every rule in every cell, and how many runs collapsed."""
    columns = [cell for cell in cells(runs) if cell[0] == "0/1"]
    rows = [[f"`{rule}`", *(_short_cell(_of(_at(runs, cell), rule)) for cell in columns)] for rule in rules]
    names = [f"lag {lag}, lr {lr:g}" for _, lag, lr in columns]
    title = "## Final accuracy, and collapsed of all runs where any did\n\n"
    return title + table(("rule", *names), rows)


def _short_cell(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    collapsed = sum(map(has_collapsed, runs))
    mean = f"{statistics.fmean(run['accuracy'] for run in runs):.2f}"
    return f"{mean} ({collapsed} of {len(runs)})" if collapsed else mean


def _row(rule: str, runs: Sequence[Run], all_runs: Sequence[Run]) -> list[str]:
    def over(name: str, place: int) -> list[float]:
        return [run["over_steps"][name][place] for run in runs if name in run["over_steps"]]

    def middle(name: str, place: int, digits: int) -> str:
        found = over(name, place)
        return f"{statistics.median(found):.{digits}f}" if found else ""

    has_b = TASK_RULES[rule].baseline in OPTIMAL
    return [
        f"`{rule}`",
        str(len(runs)),
        with_interval([run["accuracy"] for run in runs]),
        "" if rule == SHIPPED else with_interval(differences(runs, _of(all_runs, SHIPPED)), sign="+"),
        str(sum(map(has_collapsed, runs))),
        str(sum(map(has_fallen, runs))),
        with_interval([statistics.fmean(run["curve"]) for run in runs]),
        spread([steps_to(run, LEARNED) for run in runs], 0),
        spread([lowest_after(run, LEARNED) for run in runs]),
        middle("ess_ratio", MIDDLE, 2),
        middle("grad_norm", MIDDLE, 2),
        middle("max_weight", LARGEST, 0),
        middle("baseline_minus_mean", MEAN, 2) if has_b else "",
        spread(over("baseline_minus_mean_max", LARGEST)) if has_b else "",
        spread([statistics.fmean(run["steps"]["entropy"][-5:]) for run in runs if run["steps"]["entropy"]]),
    ]


def differences(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """Final accuracies minus those of the other rule's run of the same seed, where there is one."""
    known = {run["seed"]: run["accuracy"] for run in others}
    return [run["accuracy"] - known[run["seed"]] for run in runs if run["seed"] in known]


def with_interval(values: Sequence[float], *, sign: str = "") -> str:
    """`mean [from, to]`; without an interval where there is only one value.

    >>> with_interval([0.25, 0.25], sign="+"), with_interval([])
    ('+0.25 [+0.25, +0.25]', '')
    """
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{sign}.2f}"
    if len(values) == 1:
        return mean
    low, high = interval(values)
    return f"{mean} [{low:{sign}.2f}, {high:{sign}.2f}]"


def _variances(runs: Sequence[Run]) -> str:
    """Each baseline's variance as a ratio to the mean baseline's on the same batch, by when it was measured."""
    names = sorted({name for run in runs for one in run["variances"] for name in one})
    rows = []
    for i in range(max((len(run["variances"]) for run in runs), default=0)):
        batches = [run["variances"][i] for run in runs if len(run["variances"]) > i]
        usable = [one for one in batches if all(one.get(name, 0.0) > 0 for name in names)]
        if usable:
            ratios = [spread([one[name] / one[VARIANCE + "mean"] for one in usable]) for name in names]
            rows.append([str(i + 1), str(len(usable)), *ratios])
    if not rows:
        return ""
    columns = ("measurement of a run", "batches", *(f"{name.removeprefix(VARIANCE)} / mean" for name in names))
    return "\nVariance of the gradient under each baseline, on the same batches of all rules' runs:\n\n" + table(
        columns, rows
    )
