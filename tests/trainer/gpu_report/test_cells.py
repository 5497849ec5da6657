"""The cells of the GPU report: run with tiny shapes on a CPU, and on a GPU with `pytest -m gpu`."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.supervision.child import module_command
from tests.device import without_gpus
from trainer.gpu_report import workload
from trainer.gpu_report.__main__ import measure
from trainer.gpu_report.cells import Cell, Claims, NotHere, Setup, cells

ON_GPU = ["parity_float32", "parity_bfloat16", "updates_ipc", "updates_safetensors", "memory_0.5B", "shared_run"]


def measured(name: str, device: str, folder: Path, timeout_s: float, **env: str) -> dict[str, Any]:
    """As the report measures it: in a process of its own."""
    import os

    out = folder / "out.json"
    command = [*module_command("trainer.gpu_report"), name, "--device", device, "--out", str(out)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["status"] == "done", found["reason"] + done.stderr[-3000:]
    return dict(found["measured"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cell_names_a_function_that_takes_its_arguments(device: Any) -> None:
    for cell in cells(device).values():
        module, _, name = cell.function.partition(":")
        function = getattr(importlib.import_module(f"trainer.gpu_report.{module}"), name)
        setup = Setup(device=device, folder=Path())
        inspect.signature(function).bind(setup, Claims(), **cell.arguments)
        size, length = cell.arguments.get("size"), cell.arguments.get("length")
        assert size is None or length in workload.BATCHES[size]


def test_listing_cells_loads_no_torch() -> None:
    code = "import sys; from trainer.gpu_report.cells import cells; cells('cuda'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [
        (NotHere("one GPU"), "skipped", "one GPU"),
        (MemoryError("too large"), "failed", "MemoryError: too large"),
        (None, "failed", "too slow"),
    ],
)
def test_what_becomes_of_a_cell_is_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Exception | None, status: str, reason: str
) -> None:
    def ask(cell: Cell, setup: Setup, claims: Claims) -> dict[str, Any]:
        if raised is not None:
            raise raised
        claims.hold(True, "not this one")
        claims.hold(False, "too slow")
        return {"seconds": 3.0}

    monkeypatch.setattr(Cell, "ask", ask)
    found = measure("machine", Setup(device="cpu", folder=tmp_path))
    assert (found["status"], found["reason"]) == (status, reason)
    assert found["measured"] == ({} if raised else {"seconds": 3.0})  # what was measured is kept


@pytest.mark.slow
def test_memory_is_that_of_every_phase_of_the_learner(tmp_path: Path) -> None:
    found = measured("memory_tiny", "cpu", tmp_path, 170, **without_gpus())
    phases = ["load", "prove", "start", "estimate", "hand_over", "optimizer_step"]
    assert list(found["peak_bytes"]) == phases
    assert all(peak > 10e6 for peak in found["peak_bytes"].values())
    assert set(phases) <= found["planned_bytes"].keys() and all(found["planned_bytes"].values())


@pytest.mark.slow
def test_steps_are_measured_for_every_method(tmp_path: Path) -> None:
    found = measured("steps_tiny_mixed", "cpu", tmp_path, 170, **without_gpus())
    assert list(found["methods"]) == ["plain", "exact", "proxy"]
    for one in found["methods"].values():
        assert one["seconds"] > 0 and len(one["rounds_s"]) == 3
        assert one["tokens_per_s"] == pytest.approx(found["tokens"] / one["seconds"])
        assert one["share_of_ceiling"] == pytest.approx(
            found["counted_flops"] / one["seconds"] / found["ceiling_flops_per_s"]
        )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(500)
def test_engine_and_learner_agree_and_the_sums_spread_little(tmp_path: Path) -> None:
    found = measured("parity_float32", "cpu", tmp_path, 480)
    assert found["sampled"]["max_abs_nats"] < 1e-4 and found["prompt"]["max_abs_nats"] < 1e-4
    assert found["sigma_of_sums_nats"]["64"] < 1e-3


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(500)
def test_an_engine_killed_while_it_takes_streamed_weights_proves_them_when_it_is_back(tmp_path: Path) -> None:
    found = measured("updates_gloo", "cpu", tmp_path, 480)
    assert found["idle"]["gap_s"] > 0 and found["busy"]["bytes_per_s_of_gap"] > 0
    assert "layers.1" in found["refused"]["said"]
    assert found["killed"]["killed"] == "with half of the tensors sent"


@pytest.mark.gpu
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ON_GPU)
def test_a_cell_on_a_gpu(tmp_path: Path, name: str) -> None:
    pytest.importorskip("deepspeed")
    if not name.startswith("memory"):
        pytest.importorskip("vllm")
    assert measured(name, "cuda", tmp_path, 680)["summary"]


@pytest.mark.gpu(num_gpus=2)
@pytest.mark.timeout(700)
def test_an_engine_killed_over_nccl(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    assert measured("updates_nccl", "cuda", tmp_path, 680)["killed"]
