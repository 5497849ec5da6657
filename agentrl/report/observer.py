"""What a run tells the person who watches it: each step, each held-out measurement, the result.

Independent of terminals and files: the console shows it, `agentrl doctor --deep` judges it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agentrl.engine.base import WeightUpdate
from agentrl.report.statistics import EvalResult
from agentrl.types import StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step that was made and whose weights are in the engines.

    Example:
        StepReport(step=1, output=output, update=session.last_update, metrics={"rollout/reward_mean": 0.5})
    """

    step: int
    output: StepOutput  # of the learner
    update: WeightUpdate | None  # by which the engines took the new weights; None where none was measured
    metrics: Mapping[str, float]  # to be shown and stored; what decides something has a field of its own


class Observer(Protocol):
    """Shows the run to a person.

    Example:
        observer: Observer = TrainConsole(total_steps=100)
    """

    def step(self, report: StepReport) -> None:
        """A step was made and its weights are in the engines."""

    def evaluated(self, result: EvalResult) -> None:
        """A held-out measurement is finished."""

    def evaluating(self, done: int, total: int) -> None:
        """A held-out measurement is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run.

    Example:
        summary = await orchestrator.run()
        improvement = summary.after.avg - summary.before.avg
    """

    num_steps: int
    before: EvalResult
    after: EvalResult
    train_s: float
    overlap: float  # share of the learner's working time during which the engine generated, since its last start
    note: str = ""  # why it ended early; empty if it did not
