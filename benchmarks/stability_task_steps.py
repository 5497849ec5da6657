"""What is kept of a run's steps in the study of the quickstart's task: some kilobytes, committed for every run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

VARIANCE = "vitals/split_variance_"
KEPT = ("ess_ratio", "entropy")
"""Metrics of the learner, without their prefix, that are kept of every step."""
NOTED = (
    *KEPT,
    *("grad_norm", "lr_scale", "max_weight", "mean_weight", "clip_fraction", "kl", "lag_max", "skipped_steps"),
    *("baseline_minus_mean", "baseline_minus_mean_max", "groups_without_gradient"),
)
"""Metrics of which the median, the mean and the largest value are kept."""


def summary(steps: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """`steps`: the metrics in KEPT, of every step. `over_steps`: (median, mean, largest) of those in NOTED.

    >>> one = summary({name: [1.0, 2.0, 6.0] for name in NOTED})
    >>> one["over_steps"]["kl"]
    [2.0, 3.0, 6.0]
    """
    return {
        "steps": {name: [_short(value) for value in steps[name]] for name in KEPT},
        "over_steps": {
            name: [_short(reduce(values)) for reduce in (statistics.median, statistics.fmean, max)]
            for name, values in steps.items()
            if values
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")
