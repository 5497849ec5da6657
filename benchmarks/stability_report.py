"""Tables and verdicts of the stability study, from the runs' own numbers. Independent of how the runs were made.

Pictures are in stability_pictures.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.reporting import table
from benchmarks.stability_rules import RULES

Run = dict[str, Any]
WINDOW = 20
SETTLED = 10  # steps after which a run has learned what it can from the first weights' episodes
COLUMNS = (
    "rule",
    "runs",
    "collapsed",
    "fell",
    "final accuracy",
    "lowest after 90%",
    "steps to 90%",
    "rho",
    "grad norm",
    "std of gradient",
    "largest weight",
    "b - mean",
    "its largest",
    "steps down > up",
)


def best_so_far(curve: Sequence[float]) -> list[tuple[float, float]]:
    """(mean of the last WINDOW, best such mean until then), at the end of every window."""
    means = [sum(curve[i : i + WINDOW]) / WINDOW for i in range(len(curve) - WINDOW + 1)]
    return [(mean, max(means[: i + 1])) for i, mean in enumerate(means)]


def has_collapsed(run: Run) -> bool:
    """See `stability.py` for the definition."""
    return bool(run["accuracy"] < best_so_far(run["curve"])[-1][1] / 2)


def has_fallen(run: Run) -> bool:
    """See `stability.py` for the definition."""
    return any(mean < best / 2 for mean, best in best_so_far(run["curve"]))


def steps_to(run: Run, reward: float = 0.9) -> int | None:
    """See `stability.py` for the definition."""
    return next((i + WINDOW for i, (mean, _) in enumerate(best_so_far(run["curve"])) if mean >= reward), None)


def lowest_after(run: Run, reward: float = 0.9) -> float | None:
    """The worst WINDOW weights in a row after a run has first reached `reward`. None: it never did."""
    reached = steps_to(run, reward)
    return None if reached is None else min(mean for mean, _ in best_so_far(run["curve"])[reached - WINDOW :])


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """`median (least to greatest)`; runs that have no such number are left out, and counted."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "never"
    middle, least, most = (f"{f(numbers):.{digits}f}" for f in (statistics.median, min, max))
    missing = f", never in {len(values) - len(numbers)}" if len(numbers) < len(values) else ""
    return (middle if least == most else f"{middle} ({least} to {most})") + missing


def of_steps(run: Run, name: str, reduce: Callable[[list[float]], float] = statistics.median) -> float:
    """One number of a run from what it noted at every step that had a gradient."""
    pairs = zip(run["steps"][name], run["steps"]["num_groups"], strict=True)
    values: list[float] = [value for value, num_groups in pairs if num_groups]
    return reduce(values or [0.0])


def pushing_down(run: Run) -> float:
    """Share of the steps with a gradient whose weighted score norms are pushed down more than up."""
    steps = run["steps"]
    pairs = [(d, u) for d, u, n in zip(steps["down"], steps["up"], steps["num_groups"], strict=True) if n]
    return sum(1 for down, up in pairs if down > up) / max(len(pairs), 1)


def row(rule: str, runs: Sequence[Run]) -> list[str]:
    """A rule's line at one setting."""

    def steps(name: str, reduce: Callable[[list[float]], float], digits: int) -> str:
        return f"{statistics.median(of_steps(run, name, reduce) for run in runs):.{digits}f}"

    has_b = RULES[rule].optimum is not None
    std = statistics.median(of_steps(run, "variance") ** 0.5 for run in runs)
    return [
        f"`{rule}`",
        str(len(runs)),
        str(sum(map(has_collapsed, runs))),
        str(sum(map(has_fallen, runs))),
        spread([run["accuracy"] for run in runs]),
        spread([lowest_after(run) for run in runs]),
        spread([steps_to(run) for run in runs], 0),
        steps("rho", statistics.median, 2),
        steps("grad_norm", statistics.median, 3),
        f"{std:.3f}",
        steps("max_weight", max, 0),
        steps("shift", statistics.fmean, 2) if has_b else "",
        spread([of_steps(run, "shift_max", max) for run in runs]) if has_b else "",
        f"{statistics.median(map(pushing_down, runs)):.0%}" if has_b else "",
    ]


def settings(runs: Sequence[Run]) -> list[tuple[float, int]]:
    """(lr, lag) that occur: the highest rate first."""
    return sorted({(run["lr"], run["lag"]) for run in runs if run["then"] is None}, key=lambda one: (-one[0], one[1]))


def chosen(runs: Sequence[Run], rule: str, lr: float, lag: int) -> list[Run]:
    """Runs of one line of a table."""
    return [r for r in runs if (r["rule"], r["lr"], r["lag"], r["then"]) == (rule, lr, lag, None)]


def tables(runs: Sequence[Run]) -> str:
    """One table per setting: medians over seeds of the numbers of each run, with the range in brackets."""
    parts = []
    for lr, lag in settings(runs):
        rows = [row(rule, found) for rule in RULES if (found := chosen(runs, rule, lr, lag))]
        parts.append(f"**Lag {lag}, lr {lr:g}**\n\n" + table(COLUMNS, rows))
    for lr, lag in settings(runs):
        if lag > SETTLED + WINDOW // 2:
            parts.append(_first_lag(runs, lr, lag))
    if switched := [run for run in runs if run["then"] is not None]:
        parts.append("**The same runs, changed at a step**\n\n" + _switches(runs, switched))
    return "\n".join(parts)


def _first_lag(runs: Sequence[Run], lr: float, lag: int) -> str:
    """Steps SETTLED to lag: every rule still trains on the same episodes, which the first weights sampled."""
    part, rows = slice(SETTLED, lag), []
    for rule in RULES:
        if not (found := chosen(runs, rule, lr, lag)):
            continue
        steps = [run["steps"] for run in found]
        pushed = [sum(s["down"][part]) / (sum(s["up"][part]) or 1.0) for s in steps]
        made = [run["curve"][SETTLED : lag + 1] for run in found]
        has_b = RULES[rule].optimum is not None
        rows.append(
            [
                f"`{rule}`",
                str(len(found)),
                spread(pushed) if has_b else "",
                spread([statistics.fmean(s["shift_max"][part]) for s in steps]) if has_b else "",
                spread([statistics.fmean(s["mean_weight"][part]) for s in steps]),
                spread([min(statistics.fmean(m[i : i + 5]) for i in range(len(m) - 4)) for m in made]),
            ]
        )
    columns = ("rule", "runs", "down / up", "highest b* - mean of a step", "mean weight", "lowest 5 weights in a row")
    title = f"**Steps {SETTLED} to {lag} at lag {lag}, lr {lr:g}: all rules on the same episodes**\n\n"
    return title + table(columns, rows)


def lowest_from(run: Run, step: int) -> float:
    """The worst WINDOW weights in a row that were made after a step."""
    return min(mean for mean, _ in best_so_far(run["curve"][step:]))


def _switches(runs: Sequence[Run], switched: Sequence[Run]) -> str:
    """Lowest reward after a step, and the last accuracy: of the run, with the cap, and with other random numbers."""
    found: dict[tuple[Any, ...], dict[str, Run]] = {}
    for run in switched:
        place = (run["rule"], run["lr"], run["lag"], run["seed"], run["switch_at"])
        found.setdefault(place, {})["other" if run["then"] == run["rule"] else "capped"] = run
    rows = []
    for (rule, lr, lag, seed, step), pair in sorted(found.items()):
        as_it_was = next((r for r in chosen(runs, rule, lr, lag) if r["seed"] == seed), None)
        cells = [
            "" if run is None else f"{lowest_from(run, step):.2f}, {run['accuracy']:.2f}"
            for run in (as_it_was, pair.get("capped"), pair.get("other"))
        ]
        rows.append([f"`{rule}` lag {lag} seed {seed}", step, *cells])
    return table(("run", "changed at step", "unchanged: lowest, final", "b* capped", "other random numbers"), rows)


def trace(run: Run, first: int, last: int, every: int = 1) -> str:
    """Steps before a fall: the group in which b* lies highest above the mean."""
    columns = ("step", "reward", "rho", "grad norm", "b* - mean", "owner's share", "its reward", "its weight",
               "its norm / others'", "others pushed down", "down / up")  # fmt: skip
    s = run["steps"]
    rows = [
        [
            str(i),
            *(f"{s[name][i]:.2f}" for name in ("reward", "rho", "grad_norm", "shift_max", "owner_share")),
            f"{s['owner_reward'][i]:.0f}",
            *(f"{s[name][i]:.2f}" for name in ("owner_weight", "owner_norm")),
            f"{s['negative'][i]:.0%}",
            f"{s['down'][i] / s['up'][i]:.2f}" if s["up"][i] else "",
        ]
        for i in range(first, last, every)
    ]
    return table(columns, rows)
