"""`python -m benchmarks.learner`: measures, prints, and writes benchmarks/learner.md.

Each cell (a model and a batch) is measured alone and kept in a JSON file, so that a run can be made in pieces; the
report is of all cells in that file. TRL as the outside yardstick needs an environment of its own:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python -m benchmarks.learner --trl-python trl/bin/python

With a GPU: --device cuda --models 0.5B 1.5B.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import reporting
from benchmarks.learner import report, run
from trainer.gpu_report import workload

REPORT = reporting.ROOT / "benchmarks" / "learner.md"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", choices=workload.BATCHES, default=["1M", "20M"], help="none: report only"
    )
    parser.add_argument("--lengths", nargs="+", default=["512", "2k", "16k", "mixed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--trl-python", type=Path, help="Python of an environment that has TRL")
    parser.add_argument("--lock", type=Path, help="file to lock while measuring, on a machine shared with others")
    parser.add_argument("--results", type=Path, default=REPORT.with_suffix(".json"), help="cells measured so far")
    parser.add_argument("--out", type=Path, default=REPORT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cells = run.load(options.results)
    for size in options.models:
        if unknown := set(options.lengths) - workload.BATCHES[size].keys():
            parser.error(f"{size} has no batch {sorted(unknown)}; there are {', '.join(workload.BATCHES[size])}")
    wanted = [(size, length) for size in options.models for length in options.lengths]
    with ExitStack() as stack:
        if wanted:
            bench = run.Bench(
                device=torch.device(options.device),
                num_threads=options.threads,
                trl_python=options.trl_python,
                lock=options.lock,
            )
            stack.enter_context(bench)
        for size, length in wanted:
            began = time.monotonic()
            cell = bench.measure(size, length, num_rounds=options.rounds)
            cells[cell.name] = cell
            run.save(options.results, cells)
            options.out.write_text(report.text(list(cells.values())))
            print(f"{cell.name}: {time.monotonic() - began:.0f} s", flush=True)
    options.out.write_text(report.text(list(cells.values())))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
