"""Cells as tables, goals first. The text between the tables is written by hand, in `reading.md`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import reporting
from benchmarks.learner.run import Cell
from trainer.gpu_report.methods import PLAIN, REFERENCE

EXACT, NO_NORMS = "vcpo exact", "ours, no norms"
READING = Path(__file__).with_name("reading.md")


def text(cells: Sequence[Cell]) -> str:
    """The report, as Markdown."""
    parts = ["# Learner: what a step costs\n", READING.read_text(), "\n## Against the goals\n", _goals(cells)]
    for cell in cells:
        facts = cell.header.split("\n", 2)[2].rstrip()
        parts.append(f"\n## {cell.size} parameters, {cell.length}, {cell.device}\n\n{facts}\n{_described(cell)}\n")
        parts.append(_table(cell))
    return "\n".join(parts)


def ratios(cell: Cell, name: str, base: str) -> list[float]:
    """Seconds of one method over those of another, round by round."""
    pairs = zip(cell.results[name].seconds, cell.results[base].seconds, strict=True)
    return [ours / theirs for ours, theirs in pairs]


def ceiling_shares(cell: Cell, name: str) -> list[float]:
    """Of the matrix products' rate, what the method reaches counting a plain step's operations; round by round."""
    pairs = zip(cell.results[name].seconds, cell.ceiling_flops_per_s, strict=True)
    return [cell.num_flops / seconds / ceiling for seconds, ceiling in pairs]


def _described(cell: Cell) -> str:
    lengths = sorted(cell.lengths)
    return (
        f"- batch: {len(lengths)} trajectories, {sum(lengths)} tokens; least {lengths[0]}, median "
        f"{statistics.median(lengths):.0f}, mean {statistics.mean(lengths):.0f}, longest {lengths[-1]}; padded to the "
        f"longest it has {cell.padding:.2f} times the tokens\n"
        f"- model: {cell.num_parameters:,} parameters, one gradient in float32 is {_mib(cell.buffer_bytes)} MiB; "
        f"{cell.num_threads} threads; matrix products "
        f"{reporting.spread([one / 1e9 for one in cell.ceiling_flops_per_s], 0)} GFLOP/s"
    )


def _table(cell: Cell) -> str:
    rows = []
    for name, result in cell.results.items():
        rows.append(
            [
                name,
                reporting.spread(result.seconds, 2),
                reporting.spread(ratios(cell, name, PLAIN), 2),
                reporting.spread(ratios(cell, REFERENCE, name), 2),
                f"{statistics.median(ceiling_shares(cell, name)):.0%}",
                _mib(result.peak_bytes),
                f"{result.peak_bytes / cell.buffer_bytes:.1f}",
                _more(cell, name, PLAIN),
                _more(cell, name, NO_NORMS),
                "" if result.error is None else f"{result.error:.0e} ({result.against})",
            ]
        )
    columns = ["", "seconds", "/ plain", "times faster than the reference way", "of the ceiling", "peak, MiB",
               "in gradients", "over plain", "over ours, no norms", "relative error (of)"]  # fmt: skip
    return reporting.table(columns, rows)


def _goals(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        slow = statistics.median(ratios(cell, EXACT, PLAIN))
        gain = statistics.median(ratios(cell, REFERENCE, EXACT))
        is_long = statistics.mean(cell.lengths) >= 2000
        rows.append(
            [
                cell.name,
                f"{slow:.2f}"
                + (_verdict(slow <= (1.05 if is_long else 1.25)) if is_long or cell.length == "mixed" else ""),
                f"{gain:.1f}" + (_verdict(gain >= 8) if cell.length == "mixed" else ""),
                _more(cell, EXACT, PLAIN),
                _more(cell, EXACT, NO_NORMS),
                f"{statistics.median(ceiling_shares(cell, EXACT)):.0%}",
            ]
        )
    columns = [
        "",
        "exact / plain (goal 1.05 at mean length >= 2k, 1.25 on mixed)",
        "times faster than the reference (goal 8 on mixed)",
        "exact's peak over plain's, in gradients",
        "over that of our step without norms",
        "of the ceiling (goal 40% on an H200, 1.5B)",
    ]
    return reporting.table(columns, rows)


def _more(cell: Cell, name: str, base: str) -> str:
    more = cell.results[name].peak_bytes - cell.results[base].peak_bytes
    return f"{more / cell.buffer_bytes:+.1f}"


def _verdict(is_met: bool) -> str:
    return ": met" if is_met else ": **missed**"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f}"
