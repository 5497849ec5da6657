"""`python -m trainer.gpu_report`: lists the cells as JSON, or measures one and writes it to a file.

The process may be ended at any time: the file appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from trainer.gpu_report.cells import Claims, NotHere, Setup, cells


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", nargs="?", help="without it, the cells are listed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the cell's result")
    options = parser.parse_args()
    known = cells(options.device)
    if options.cell is None:
        listed = {name: {"title": one.title, "deadline_s": one.deadline_s} for name, one in known.items()}
        print(json.dumps(listed))  # noqa: T201
        return
    if options.cell not in known or options.out is None:
        parser.error(f"one of {', '.join(known)}, with --out FILE")
    with tempfile.TemporaryDirectory(prefix="agentrl-cell-", ignore_cleanup_errors=True) as folder:
        setup = Setup(device=options.device, folder=Path(folder))
        result = measure(options.cell, setup)
    temporary = options.out.with_suffix(".part")
    temporary.write_text(json.dumps(result))
    os.replace(temporary, options.out)


def measure(name: str, setup: Setup) -> dict[str, Any]:
    """Status (`done`, `failed`, `skipped`), reason and measurement of a cell."""
    claims, cell = Claims(), cells(setup.device)[name]
    try:
        if setup.device == "cuda":
            cell.limit_gpus()
        measured = cell.ask(setup, claims)
    except NotHere as reason:
        return {"status": "skipped", "reason": str(reason), "measured": {}}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}", "measured": {}}
    status = "failed" if claims.broken else "done"
    return {"status": status, "reason": "; ".join(claims.broken), "measured": measured}


if __name__ == "__main__":
    main()
