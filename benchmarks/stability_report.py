"""Tables and pictures of the stability study, from the runs' own numbers. Knows nothing of how they were made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]
WINDOW = 20


def best_so_far(curve: Sequence[float]) -> list[tuple[float, float]]:
    """(mean of the last WINDOW, best such mean until then), at the end of every window."""
    means = [sum(curve[i : i + WINDOW]) / WINDOW for i in range(len(curve) - WINDOW + 1)]
    return [(mean, max(means[: i + 1])) for i, mean in enumerate(means)]


def has_collapsed(run: Run) -> bool:
    """The definition at the top of stability.py."""
    return bool(run["accuracy"] < best_so_far(run["curve"])[-1][1] / 2)


def has_fallen(run: Run) -> bool:
    """Likewise."""
    return any(mean < best / 2 for mean, best in best_so_far(run["curve"]))


def steps_to(run: Run, reward: float = 0.9) -> int | None:
    """Likewise."""
    return next((i + WINDOW for i, (mean, _) in enumerate(best_so_far(run["curve"])) if mean >= reward), None)


def report(runs: Sequence[Run], pictures: Path) -> str:
    """Markdown; pictures go to a folder."""
    raise NotImplementedError
