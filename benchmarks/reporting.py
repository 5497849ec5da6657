"""The header of every report (machine, commit, settings), and shared statistics. Measures nothing itself."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def header(title: str, settings: Mapping[str, object]) -> str:
    """Title, date, commit, machine and settings, as Markdown. Call it before measuring, to show the prior load."""
    lines = [f"# {title}", ""]
    facts = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "commit": _commit(), "machine": _machine()}
    lines += [f"- {name}: {value}" for name, value in {**facts, **settings}.items()]
    return "\n".join(lines) + "\n"


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
