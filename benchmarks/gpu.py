"""`python -m benchmarks.gpu`: the GPU report of `agentrl doctor --gpu-report`, kept as benchmarks/gpu.json.

The cells are in trainer/gpu_report/. With --cpu they run with tiny shapes, to see that they work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from agentrl.cli.doctor import gpu_report
from agentrl.cli.options import guarded, run
from benchmarks.reporting import ROOT

OUT = ROOT / "benchmarks" / "gpu.json"


def main() -> None:
    """Command line. Exit code 1 where a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these cells alone")
    parser.add_argument("--again", nargs="+", metavar="CELL", default=[], help="cells to measure once more")
    parser.add_argument("--minutes", type=float, default=gpu_report.BUDGET_S / 60)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    request = gpu_report.ReportRequest(
        path=options.out,
        device=guarded(lambda: gpu_report.device_of_report(cpu=options.cpu), debug=False),
        again=tuple(options.again),
        budget_s=60 * options.minutes,
        only=tuple(options.only) if options.only else None,
    )
    report = run(gpu_report.shown(request, Console(highlight=False), findings=[]), debug=False)
    raise SystemExit(int(gpu_report.has_failed(report)))


if __name__ == "__main__":
    main()
