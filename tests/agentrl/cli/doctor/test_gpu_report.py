"""`agentrl doctor --gpu-report`: what the file holds, how a call goes on, and what it refuses. Cells run on the CPU."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentrl.cli.doctor import gpu_report
from agentrl.cli.doctor.findings import ok
from agentrl.cli.doctor.gpu_report import ReportRequest
from agentrl.cli.main import app
from agentrl.errors import ConfigError
from tests.device import HAS_GPU


def request(path: Path, **changes: Any) -> ReportRequest:
    return ReportRequest(**{"path": path, "device": "cpu", "only": ("machine",), **changes})


async def test_a_cell_is_kept_until_it_is_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = await gpu_report.measure(request(path), findings=[ok("memory", "enough")])
    cell = first["cells"]["machine"]
    assert cell["status"] == "done" and cell["measured"]["versions"]["torch"] and cell["wall_s"] > 0
    assert (first["schema_version"], first["device"], first["commit"]) == (1, "cpu", gpu_report._commit())
    assert first["findings"][0]["found"] == "enough"
    assert json.loads(path.read_text()) == first
    path.write_text(json.dumps({**first, "cells": {"machine": {**cell, "wall_s": -1}}}))
    kept = await gpu_report.measure(request(path))
    assert kept["cells"]["machine"]["wall_s"] == -1
    again = await gpu_report.measure(request(path, again=("machine",)))
    assert again["cells"]["machine"]["wall_s"] > 0


async def test_the_time_is_up_and_the_next_call_goes_on(tmp_path: Path) -> None:
    report = await gpu_report.measure(request(tmp_path / "out.json", budget_s=1.0))
    assert report["cells"]["machine"]["status"] == "not run" and gpu_report.has_failed(report)
    text = StringIO()
    gpu_report.print_report(Console(file=text, width=100), report, tmp_path / "out.json")
    assert "Call again to measure what is left: machine" in text.getvalue()
    report = await gpu_report.measure(request(tmp_path / "out.json"))
    assert report["cells"]["machine"]["status"] == "done" and not gpu_report.has_failed(report)


async def test_a_cell_that_is_late_or_dies_is_a_result() -> None:
    late = await gpu_report._cell("matmul", "cpu", deadline_s=0.3)
    assert late["status"] == "failed" and late["reason"] == "not done within 0 s" and late["log_end"]
    died = await gpu_report._cell("no such cell", "cpu", deadline_s=60)
    assert "exit code 2" in died["reason"] and "one of machine, matmul" in died["log_end"]


async def test_an_interrupted_call_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    begun = asyncio.Event()

    def say(title: str, used: float) -> None:
        if title.startswith("matrix"):
            begun.set()

    measuring = asyncio.create_task(gpu_report.measure(request(path, only=("machine", "matmul")), say=say))
    await asyncio.wait_for(begun.wait(), 120)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert list(json.loads(path.read_text())["cells"]) == ["machine"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is no report"),
        ("[]", "is no report"),
        ("{}", "is no report"),
        ({"machine_fingerprint": "another"}, "another machine"),
        ({"device": "cuda"}, "another machine, device"),
        ({"commit": "0123456789ab"}, "commit of agentrl"),
    ],
)
async def test_another_file_is_not_overwritten(tmp_path: Path, content: str | dict[str, str], said: str) -> None:
    path = tmp_path / "out.json"
    if isinstance(content, dict):
        own = gpu_report._begun(request(path))
        path.write_text(json.dumps({**own, **content}))
    else:
        path.write_text(content)
    before = path.read_text()
    with pytest.raises(ConfigError, match=said):
        await gpu_report.measure(request(path))
    assert path.read_text() == before


async def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: No such file or directory"):
        await gpu_report.measure(request(tmp_path / "nowhere" / "out.json"))
    with pytest.raises(ConfigError, match=r"no cell speed; there are machine, matmul"):
        await gpu_report.measure(request(tmp_path / "out.json", only=("speed",)))
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_says_what_cpu_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "has_nvidia_device", lambda: False)
    with pytest.raises(ConfigError, match=r"shows no NVIDIA GPU, so nothing was measured. `--cpu`"):
        gpu_report.device_of_report(cpu=False)
    assert gpu_report.device_of_report(cpu=True) == "cpu"
    monkeypatch.setattr(gpu_report, "has_nvidia_device", lambda: True)
    assert gpu_report.device_of_report(cpu=False) == "cuda"


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_command_refuses_before_anything_is_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--gpu-report", str(tmp_path / "out.json")])
    assert done.exit_code == 2 and "shows no NVIDIA GPU" in " ".join(done.output.split())
    assert "memory" not in done.output and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--cpu"], ["--again", "machine"]])
def test_options_of_the_report_need_it(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *options])
    assert done.exit_code == 2 and "--gpu-report" in done.output
