"""The header of every report (machine, commit, settings), and shared statistics. Measures nothing itself."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import DataError

ROOT = Path(__file__).parent.parent
NUM_RESAMPLES = 4000


def header(title: str, settings: Mapping[str, object]) -> str:
    """Title, date, commit, machine and settings, as Markdown. Call it before measuring, to show the prior load."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in {**facts(), **settings}.items()]
    return "\n".join(lines) + "\n"


def facts() -> dict[str, str]:
    """Date, commit and machine with its present load."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"date": date, "commit": _commit(), "machine": _machine()}


def load_runs(path: Path) -> list[dict[str, Any]]:
    """The records of a sweep, a line a run; none where the file does not exist. Raises DataError for a broken line."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{place}: not a whole record: remove this line, then make the run that it was of again")
    return record


def interval(values: Sequence[float], *, share: float = 0.95) -> tuple[float, float]:
    """The percentile interval of the mean, by resampling the values. Raises ValueError without any.

    >>> interval([0.5, 0.5])
    (0.5, 0.5)
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    cut = round((1 - share) / 2 * NUM_RESAMPLES)
    return means[cut], means[-1 - cut]


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile `share`, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (least to greatest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " with changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _machine() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{model}, {cores} cores, {memory_gib:.0f} GiB, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}; load when it began {os.getloadavg()[0]:.1f}"
    )
