"""`agentrl doctor --gpu-report FILE`: measures a GPU machine cell by cell, and writes one JSON to send back.

Each cell is a process of its own with a deadline (`python -m trainer.gpu_report`). The file is written after each, so a
call that was cut off goes on where it stopped. Loads no torch. docs/gpu.md says what the cells measure.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from agentrl.cli.doctor.findings import Finding, shortened
from agentrl.engine.vllm_command import has_nvidia_device
from agentrl.errors import DISTRIBUTION, ConfigError
from agentrl.run_folder import write_atomically
from agentrl.supervision.child import child, module_command

SCHEMA_VERSION = 1
BUDGET_S = 45 * 60.0
"""Of one call; a later call measures what is left."""
LEAST_S = 20.0
"""A cell is not begun with less time than this."""
LIST_TIMEOUT_S = 120.0
MODULE = "trainer.gpu_report"
ISSUES = "read it, and attach it to an issue of the project. The ends of logs in it may name folders of yours"
STYLES = {"done": "green", "failed": "bold red", "skipped": "yellow", "not run": "dim"}

Device = Literal["cpu", "cuda"]
Say = Callable[[str, float], None]
"""Called with what is measured now, and the share of the budget that is used."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What to measure and where to write it. Example: `ReportRequest(path=Path("gpu.json"), device="cuda")`."""

    path: Path
    device: Device
    again: tuple[str, ...] = ()
    """Cells to measure although the file has them."""
    budget_s: float = BUDGET_S
    only: tuple[str, ...] | None = None
    """Cells to measure; None: all."""


def device_of_report(*, cpu: bool) -> Device:
    """What is measured. Raises ConfigError where there is no GPU, unless `cpu` asks for tiny shapes on the CPU."""
    if cpu:
        return "cpu"
    if not has_nvidia_device():
        raise ConfigError(
            "--gpu-report: this machine shows no NVIDIA GPU, so nothing was measured. `--cpu` runs the same cells with "
            "tiny shapes on the CPU, which says whether the measuring works and nothing about a GPU"
        )
    return "cuda"


async def measure(
    request: ReportRequest, *, findings: Sequence[Finding] = (), say: Say = lambda *_: None
) -> dict[str, Any]:
    """The report, which is in the file too. Cells that the file has as `done` are kept.

    Raises ConfigError for a file that cannot be written or is another machine's, and for an unknown cell.
    """
    report = _begun(request)
    report["findings"] = [asdict(one) for one in findings]
    listed = await asyncio.to_thread(_listed, request.device)
    if unknown := {*request.again, *(request.only or ())} - listed.keys():
        raise ConfigError(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(listed)}")
    _save(request.path, report)
    began = time.monotonic()
    for name in request.only or listed:
        if report["cells"].get(name, {}).get("status") == "done" and name not in request.again:
            continue
        left_s = request.budget_s - (time.monotonic() - began)
        say(listed[name]["title"], 1 - left_s / request.budget_s)
        if left_s < LEAST_S:
            found = {"status": "not run", "reason": "the time was up: call again to measure it", "measured": {}}
        else:
            found = await _cell(name, request.device, deadline_s=min(listed[name]["deadline_s"], left_s))
        report["cells"][name] = {"title": listed[name]["title"], **found}
        _save(request.path, report)
    return report


async def _cell(name: str, device: Device, *, deadline_s: float) -> dict[str, Any]:
    """The result of one cell; whatever becomes of its process is one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-report-", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "cell.log"
        command = [*module_command(MODULE), name, "--device", device, "--out", str(out)]
        async with child(name, command, log_path=log) as part:
            try:
                async with asyncio.timeout(deadline_s):
                    code: int | None = await part.wait()
            except TimeoutError:
                code = None
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text())
        else:
            how = f"not done within {deadline_s:.0f} s" if code is None else f"its process ended with exit code {code}"
            found = {"status": "failed", "reason": how, "measured": {}}
        if found["status"] == "failed":
            found["log_end"] = part.log_tail(num_lines=60)
    return {**found, "wall_s": round(time.monotonic() - began, 1), "deadline_s": deadline_s}


def _listed(device: Device) -> dict[str, Any]:
    """Titles and deadlines of the cells by name."""
    command = [*module_command(MODULE), "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the cells could not be listed within {LIST_TIMEOUT_S:g} s: {command}") from error
    if done.returncode:
        raise ConfigError(
            f"the cells could not be listed, the learner's packages are missing: {shortened(done.stderr)}"
        )
    listed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return listed


def _begun(request: ReportRequest) -> dict[str, Any]:
    """The report in the file, or a new one. Raises ConfigError."""
    machine = _fingerprint()
    head = {
        "schema_version": SCHEMA_VERSION,
        "agentrl_version": metadata.version(DISTRIBUTION),
        "commit": _commit(),
        "device": request.device,
        "machine_fingerprint": machine,
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {"budget_s": request.budget_s},
    }
    if not request.path.exists():
        return {**head, "cells": {}}
    try:
        before = json.loads(request.path.read_text())
        same = [before[key] == head[key] for key in ("schema_version", "device", "machine_fingerprint", "commit")]
        cells = dict(before["cells"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{request.path} is no report of this command ({error}): name another file") from error
    if not all(same):
        raise ConfigError(
            f"{request.path} is a report of another machine, device or commit of agentrl: name another file, or "
            "remove it"
        )
    return {**head, "cells": cells}


def _save(path: Path, report: Mapping[str, Any]) -> None:
    """Replace the file as a whole. Raises ConfigError."""
    try:
        write_atomically(path, json.dumps(report, indent=1, allow_nan=True).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Name a file in a folder that you can write"
        ) from error


def _fingerprint() -> str:
    """Tells machines apart without naming them."""
    try:
        name = Path("/etc/machine-id").read_text()
    except OSError:
        name = os.uname().nodename
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _commit() -> str:
    """Of the checkout that agentrl is installed from; `unknown` elsewhere."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


async def shown(request: ReportRequest, console: Console, *, findings: Sequence[Finding]) -> dict[str, Any]:
    """Measure, with a bar of the time that is used; then print the table. Raises ConfigError."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} % of the time"),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=1.0)
        report = await measure(
            request,
            findings=findings,
            say=lambda title, used: progress.update(task, description=title, completed=used),
        )
    print_report(console, report, request.path)
    return report


def print_report(console: Console, report: Mapping[str, Any], path: Path) -> None:
    """A table of the cells, where the file is, and what to do with it."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "cell", "s", "found"):
        table.add_column(column, overflow="fold")
    for name, cell in report["cells"].items():
        found = cell["reason"] or cell["measured"].get("summary", "")
        status = Text(cell["status"], style=STYLES[cell["status"]])
        table.add_row(status, name, f"{cell.get('wall_s', 0):.0f}", Text(shortened(found, 300)))
    console.print(table)
    unfinished = [name for name, cell in report["cells"].items() if cell["status"] in ("failed", "not run")]
    if report["device"] == "cpu":
        console.print(
            Text("Tiny shapes on the CPU: the numbers say that the measuring works, and nothing about a GPU.")
        )
    if unfinished:
        console.print(Text(f"Call again to measure what is left: {', '.join(unfinished)}"))
    console.print(Text(f"The report is {path.resolve()}; {ISSUES}."))


def has_failed(report: Mapping[str, Any]) -> bool:
    """Whether a cell failed or was not reached."""
    return any(cell["status"] in ("failed", "not run") for cell in report["cells"].values())
