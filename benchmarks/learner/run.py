"""Cells of a model and a batch: every method in its own process, equal gradients first, then steps in turns."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import reporting
from benchmarks.learner import engine_steps
from trainer.gpu_report import methods, workload
from trainer.gpu_report.methods import PLAIN, REFERENCE

TRL = "TRL"
ERROR_BOUND = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of a method's gradient, relative to that of the method it must equal: else nothing is timed."""
AGAINST = {
    "ours, no norms": PLAIN,
    engine_steps.PLAIN_METHOD: PLAIN,
    engine_steps.LOOP: PLAIN,
    TRL: PLAIN,
    "vcpo exact": REFERENCE,
    engine_steps.TWO_PASS: REFERENCE,
}


@dataclass(kw_only=True)
class Result:
    """One method."""

    error: float | None = None  # of its gradient
    against: str = ""  # whose gradient that was compared with
    peak_bytes: float = 0.0  # over what its process held before its first step
    seconds: list[float] = field(default_factory=list)  # one a round


@dataclass(kw_only=True)
class Cell:
    """One model and batch, and what was measured on it."""

    size: str
    length: str
    device: str
    num_threads: int
    num_parameters: int
    lengths: list[int]  # tokens of each trajectory
    padding: float
    num_flops: float  # of a plain step's matrix products
    ceiling_flops_per_s: list[float] = field(default_factory=list)  # one a round
    header: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a later measurement of the same replaces."""
        return f"{self.device} {self.size} {self.length}"

    @property
    def buffer_bytes(self) -> int:
        """One gradient in float32."""
        return 4 * self.num_parameters


@dataclass(kw_only=True)
class Child:
    """A method's process."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, line: str) -> dict[str, float]:
        """Its answer. Raises RuntimeError when it has ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}; what it said stands above")
        found: dict[str, float] = json.loads(answer)
        return found

    def end(self) -> None:
        """By closing its input."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class Bench:
    """The methods' processes, which measure one cell after another.

    `lock`: a file that is locked while something is measured, for machines that are shared with others who do so too.
    """

    def __init__(self, *, device: torch.device, num_threads: int, trl_python: Path | None, lock: Path | None) -> None:
        self._device, self._num_threads, self._lock = device, num_threads, lock
        self._stack = ExitStack()
        names = [PLAIN, *methods.ALGORITHMS, *engine_steps.SETTINGS, REFERENCE, *([TRL] if trl_python else [])]
        self._children = {name: self._start(name, trl_python) for name in names}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, size: str, length: str, *, num_rounds: int) -> Cell:
        """All methods on one cell.

        Raises RuntimeError when a gradient is not what it must be, or a process ends.
        """
        lengths = workload.BATCHES[size][length]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with self._locked():
                workload.save(folder, size, lengths, self._device)
                model, samples = workload.load_model(folder, self._device), workload.load(folder)
                cell = self._cell(size, length, model, samples)
            for number, child in enumerate(self._children.values()):
                with self._locked():
                    child.ask(f"load {folder}")
                    answer = child.ask(f"check {folder / str(number)}.pt")
                cell.results[child.name] = Result(peak_bytes=answer["peak_bytes"])
            _compare(cell, folder, list(self._children), model, samples)
        del model
        for _ in range(num_rounds):
            with self._locked():
                cell.ceiling_flops_per_s.append(self._children[PLAIN].ask("ceiling")["flops_per_s"])
                for child in self._children.values():
                    cell.results[child.name].seconds.append(child.ask("time")["seconds"])
        return cell

    def _cell(self, size: str, length: str, model: Any, samples: Sequence[workload.Sample]) -> Cell:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return Cell(
            size=size,
            length=length,
            device=self._device.type,
            num_threads=self._num_threads,
            num_parameters=num_parameters,
            lengths=[len(sample.ids_T) for sample in samples],
            padding=workload.padding(samples),
            num_flops=workload.num_flops(model.config, samples, num_parameters),
            header=reporting.header(f"{size}, {length}", {}),
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _start(self, name: str, trl_python: Path | None) -> Child:
        program = [str(trl_python), "-m", "benchmarks.learner.trl_step"]
        if name != TRL:
            program = [sys.executable, "-m", "benchmarks.learner.child"]
        options = ["--device", str(self._device), "--threads", str(self._num_threads)]
        process = subprocess.Popen(
            [*program, *options, name],
            cwd=reporting.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(self._num_threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        child = Child(name=name, process=process)
        self._stack.callback(child.end)
        return child


def _compare(cell: Cell, folder: Path, names: Sequence[str], model: Any, samples: Sequence[workload.Sample]) -> None:
    def gradient(name: str) -> list[torch.Tensor]:
        loaded: list[torch.Tensor] = torch.load(folder / f"{names.index(name)}.pt", weights_only=True)
        return loaded

    proxy = folder / f"{names.index('vcpo proxy')}.json"
    coefficients = [one / len(samples) for one in json.loads(proxy.read_text())]
    plain_with_its_weights = [one.cpu() for one in methods.Plain(model, samples).weighted(coefficients)]
    for name in names:
        if name == "vcpo proxy":
            theirs, against = plain_with_its_weights, "autograd with its weights and baseline"
        elif name in AGAINST:
            theirs, against = gradient(AGAINST[name]), AGAINST[name]
        else:
            continue
        error = methods.relative_error(gradient(name), theirs)
        if not error <= ERROR_BOUND[model.dtype]:
            raise RuntimeError(f"{cell.name}: the gradient of {name!r} is {error:.2g} off {against!r}")
        cell.results[name].error, cell.results[name].against = error, against


def load(path: Path) -> dict[str, Cell]:
    """Cells measured before; none where the file is not there."""
    if not path.exists():
        return {}
    cells = [Cell(**fields) for fields in json.loads(path.read_text())]
    for cell in cells:
        cell.results = {name: Result(**fields) for name, fields in cell.results.items()}  # type: ignore[arg-type]
    return {cell.name: cell for cell in cells}


def save(path: Path, cells: dict[str, Cell]) -> None:
    """For a later call to add to."""
    path.write_text(json.dumps([asdict(cell) for cell in cells.values()], indent=1))
