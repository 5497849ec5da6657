"""What a metrics sink is, which there are, and how they are opened. Independent of how metrics are made.

A sink that fails never stops or slows a run: metrics.jsonl has every line, whatever happens here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import MissingDependencyError
from agentrl.run_folder import RunFolder, write_atomically


class MetricsSink(Protocol):
    """Takes the metrics of one run. Its class is made with the run's folder, and continues what it finds there.

    Any method may raise any exception.

    Example:
        sink: MetricsSink = TensorBoardSink(run_folder)
        sink.write(3, 1.7e9, {"learner/kl": 0.01})
    """

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the values of one moment. `step`: policy version; `time_s`: Unix time."""

    def rewind(self, step: int) -> None:
        """The steps after `step` are made again: drop them, where the library can."""

    def close(self) -> None:
        """Write what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKind:
    """A sink that a config can name.

    Example:
        SinkKind(target="agentrl.report.sinks.mlflow:MlflowSink", package="mlflow", extra="mlflow")
    """

    target: str  # module:Class
    package: str  # its library, as it is imported
    extra: str | None = None  # of pyproject.toml; None: the library is always installed
    is_isolated: bool = True  # runs in a process of its own, which can be ended when it hangs


SINKS: dict[str, SinkKind] = {
    "tensorboard": SinkKind(
        target="agentrl.report.sinks.tensorboard:TensorBoardSink", package="tensorboard", is_isolated=False
    ),
    "wandb": SinkKind(target="agentrl.report.sinks.wandb:WandbSink", package="wandb", extra="wandb"),
    "trackio": SinkKind(target="agentrl.report.sinks.trackio:TrackioSink", package="trackio", extra="trackio"),
    "mlflow": SinkKind(target="agentrl.report.sinks.mlflow:MlflowSink", package="mlflow", extra="mlflow"),
}
"""The names of `metrics.sinks`."""


def check_installed(names: Sequence[str]) -> None:
    """Raises MissingDependencyError, which says how to install it, where the library of a sink is missing."""
    for name in names:
        kind = SINKS[name]
        if importlib.util.find_spec(kind.package) is None:
            need = f"metrics.sinks: the {kind.package} package is not installed"
            if kind.extra is None:
                raise MissingDependencyError(f"{need}: pip install {kind.package}")
            raise MissingDependencyError.of_extra(need, kind.extra)


def make(name: str, run: RunFolder) -> MetricsSink:
    """The sink itself, in this process. Imports its library."""
    module, _, class_name = SINKS[name].target.partition(":")
    sink: MetricsSink = getattr(importlib.import_module(module), class_name)(run)
    return sink


def run_id(run: RunFolder, name: str) -> str:
    """The identity of this run in the sink `name`: made once, kept in the run's folder."""
    file = run.path / name / "run_id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, uuid.uuid4().hex[:12].encode())
    return file.read_text()


def flat_config(run: RunFolder) -> dict[str, Any]:
    """The run's config as dotted keys: `{"learner.lr": 1e-4}`."""

    def flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
        return found

    return flat(json.loads(run.config.read_text()), "")
