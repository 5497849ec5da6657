"""Tables of the sweep over rewards: the fate of each rule by payment and lag, and each rule against `opob_safe`.

Independent of how the runs were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.reporting import header, interval, table
from benchmarks.stability_payment import PAYMENTS
from benchmarks.stability_rules import RULES

Run = dict[str, Any]
REFERENCE = "opob_safe"
COLUMNS = (
    *("rule", "runs", "collapsed", "fell", "final accuracy", "lowest after 90 %", "mean accuracy"),
    *("against opob_safe, paired", "pushed down", "b - mean"),
)


def chosen(runs: Sequence[Run], rule: str, payment: str, lag: int) -> list[Run]:
    """Runs of one line, by seed."""
    found = [run for run in runs if (run["rule"], run["payment"], run["lag"]) == (rule, payment, lag)]
    return sorted(found, key=lambda run: run["seed"])


def mean_accuracy(run: Run) -> float:
    """Mean reward over all weights of a run: speed and stability in one number."""
    return statistics.fmean(run["curve"])


def difference(mine: Sequence[Run], reference: Sequence[Run]) -> tuple[float, float, float] | None:
    """Mean of mine - reference in mean accuracy over the seeds that both have, and its 95 % bootstrap interval.

    None with fewer than two common seeds.
    """
    of_seed = {run["seed"]: mean_accuracy(run) for run in reference}
    paired = [mean_accuracy(run) - of_seed[run["seed"]] for run in mine if run["seed"] in of_seed]
    if len(paired) < 2:
        return None
    return statistics.fmean(paired), *interval(paired)


def row(rule: str, mine: Sequence[Run], reference: Sequence[Run]) -> list[str]:
    """A rule's line at one setting."""
    against = None if rule == REFERENCE else difference(mine, reference)
    pushed = [run["down_share"] for run in mine if run["down_share"] is not None]
    return [
        f"`{rule}`",
        str(len(mine)),
        str(sum(run["collapsed"] for run in mine)),
        str(sum(run["fell"] for run in mine)),
        _spread([run["accuracy"] for run in mine]),
        _spread([run["lowest_after_90"] for run in mine]),
        f"{statistics.fmean(map(mean_accuracy, mine)):.3f}",
        "" if against is None else f"{against[0]:+.3f} ({against[1]:+.3f} to {against[2]:+.3f})",
        f"{statistics.median(pushed):.0%}" if pushed else "",
        f"{statistics.median(run['shift'] for run in mine):+.2f}" if pushed else "",
    ]


def one_table(runs: Sequence[Run], payment: str, lag: int) -> str:
    """Every rule that was run at one payment and lag."""
    reference = chosen(runs, REFERENCE, payment, lag)
    rows = [row(rule, found, reference) for rule in RULES if (found := chosen(runs, rule, payment, lag))]
    return f"## Lag {lag}, `{payment}`\n\n" + table(COLUMNS, rows)


def report(runs: Sequence[Run], num_planned: int) -> str:
    """The whole page; says how many of the planned settings (rule, payment, lag) have runs."""
    lags = sorted({run["lag"] for run in runs}, reverse=True)
    done = {(run["lag"], run["payment"]) for run in runs}
    pairs = [(lag, payment) for lag in lags for payment in PAYMENTS if (lag, payment) in done]
    num_done = len({(run["rule"], run["payment"], run["lag"]) for run in runs})
    seeds = {run["seed"] for run in runs}
    settings = {(run["lr"], run["num_steps"]) for run in runs}
    title = header("Rules under other rewards: the calculator toy", {"runs": len(runs), "seeds": len(seeds)})
    about = (
        "Payments: `benchmarks/stability_payment.py`; verdicts: `benchmarks/stability.py`. Accuracy counts right\n"
        "answers whatever is paid. *Mean accuracy* is over all weights of a run. *Against opob_safe* is the mean\n"
        "difference of that between runs of the same seed, with a 95 % bootstrap interval over seeds. *Pushed down*\n"
        "is the share of the weighted score norms with a negative advantage, *b - mean* the baseline above the\n"
        "group's mean, over groups and steps; both only where norms are measured.\n"
    )
    how = "; ".join(f"lr {lr:g}, {num_steps} steps" for lr, num_steps in sorted(settings))
    tables = [one_table(runs, payment, lag) for lag, payment in pairs]
    return "\n".join([title, f"{how}. Run so far: {num_done} of {num_planned} settings.\n", about, *tables])


def _spread(values: Sequence[float | None]) -> str:
    """`median (least to greatest)`; runs without such a number are counted."""
    found = [value for value in values if value is not None]
    if not found:
        return "never there"
    missing = f", never in {len(values) - len(found)}" if len(found) < len(values) else ""
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}){missing}"
