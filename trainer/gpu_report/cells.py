"""The cells of the report: what each measures, how long it may take, and what it needs. Loads no torch.

A cell runs in a process of its own (`__main__.py`), which `agentrl doctor --gpu-report` starts and ends.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.engine.gpus import visible_gpus

Device = Literal["cpu", "cuda"]
Measured = dict[str, Any]


class NotHere(Exception):
    """The cell cannot run on this machine; the message is the reason. Example: one GPU where two are needed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where a cell runs. Example: `Setup(device="cuda", folder=Path("/tmp/cell"))`."""

    device: Device
    folder: Path
    """Scratch space, removed afterwards."""

    @property
    def is_tiny(self) -> bool:
        """Whether shapes are tiny: on a CPU, to see that the measuring code works."""
        return self.device == "cpu"

    def of_size(self, on_gpu: Any, tiny: Any) -> Any:
        """The first on a GPU, the second on a CPU."""
        return tiny if self.is_tiny else on_gpu


class Claims:
    """Statements that a measurement contradicts. A cell with one has failed, and keeps what it measured."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def hold(self, is_true: bool, otherwise: str) -> None:
        """Note `otherwise` where the claim does not hold."""
        if not is_true:
            self.broken.append(otherwise)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement. `ask(setup, claims, **arguments)` returns it.

    Example: `Cell(title="matrix products", function="learner_cells:matmul", deadline_s=120)`.
    """

    title: str
    function: str
    deadline_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: int | None = 1
    """GPUs that it sees at most: with one, engine and learner share it. None: all."""

    def limit_gpus(self) -> None:
        """Show this process, and those it starts, the GPUs that the cell sees. Before torch is loaded."""
        if self.num_gpus is not None:
            visible = visible_gpus()
            os.environ.update(visible.environment([gpu.entry for gpu in visible.gpus[: self.num_gpus]]))

    def ask(self, setup: Setup, claims: Claims) -> Measured:
        """Measure. Raises NotHere, or whatever the measurement raises."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Measured] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function(setup, claims, **self.arguments)


def _steps(size: str, length: str) -> Cell:
    title = f"gradient of a step: {size}, {length} tokens a trajectory; plain, exact and proxy"
    return Cell(title=title, function="learner_cells:steps", deadline_s=240, arguments={"size": size, "length": length})


def _memory(size: str, length: str) -> Cell:
    title = f"peak memory of the learner by phase beside the plan: {size}, {length} tokens"
    return Cell(
        title=title, function="learner_cells:memory", deadline_s=240, arguments={"size": size, "length": length}
    )


def _parity(dtype: str) -> Cell:
    title = f"logprobs of engine and learner in {dtype}"
    arguments = {"dtype": dtype}
    return Cell(title=title, function="engine_cells:parity", deadline_s=360, arguments=arguments)


def _updates(mode: str) -> Cell:
    title = f"weights by {mode}: gap, bytes a second, a refused update, an engine killed in the middle"
    num_gpus = 2 if mode == "nccl" else 1
    return Cell(
        title=title, function="update_cells:updates", deadline_s=480, arguments={"mode": mode}, num_gpus=num_gpus
    )


def cells(device: Device) -> dict[str, Cell]:
    """All cells by name, in the order in which they run."""
    sizes, lengths = (("0.5B", "1.5B"), ("2k", "16k")) if device == "cuda" else (("tiny",), ("512", "mixed"))
    modes = ("ipc", "nccl", "safetensors") if device == "cuda" else ("gloo", "safetensors")
    found = {
        "machine": Cell(
            title="machine, driver and versions", function="learner_cells:machine", deadline_s=90, num_gpus=None
        ),
        "matmul": Cell(title="matrix products a second", function="learner_cells:matmul", deadline_s=90),
        "parity_float32": _parity("float32"),
        "parity_bfloat16": _parity("bfloat16"),
        **{f"updates_{mode}": _updates(mode) for mode in modes},
        **{f"memory_{size}": _memory(size, lengths[0]) for size in sizes},
        **{f"steps_{size}_{length}": _steps(size, length) for size in sizes for length in lengths},
        "tokens": Cell(
            title="tokens a second through our client and through bare sockets",
            function="engine_cells:tokens",
            deadline_s=300,
        ),
        "shared_run": Cell(
            title="a short run on one GPU for both, in turn", function="run_cells:shared_run", deadline_s=400
        ),
        "async_pair": Cell(
            title="a short run, synchronous and asynchronous",
            function="run_cells:async_pair",
            deadline_s=600,
            num_gpus=2,
        ),
        "gpu_tests": Cell(title="pytest -m gpu", function="run_cells:gpu_tests", deadline_s=600, num_gpus=None),
    }
    return found
