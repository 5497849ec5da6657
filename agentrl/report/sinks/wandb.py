"""Weights & Biases: offline in the run's folder `wandb/`, unless WANDB_MODE says otherwise.

`wandb sync RUN/wandb/offline-run-*` uploads. A resumed run is the same run: it keeps its id. W&B cannot take points
back: after a rewind the repeated steps have two points on the axis `policy_version`, and the later one is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from agentrl.report.sinks.base import flat_config, run_id
from agentrl.run_folder import RunFolder

PROJECT = "agentrl"  # unless WANDB_PROJECT is set


class WandbSink:
    """One run of W&B.

    Example:
        sink = WandbSink(run_folder)
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id(run, "wandb"),
            name=run.path.name,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=run.path,
            config=flat_config(run),
            settings=wandb.Settings(console="off"),
        )
        # W&B's own step only rises and would refuse the steps that are made again.
        self._run.define_metric("policy_version")
        self._run.define_metric("*", step_metric="policy_version")

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One row of the history."""
        self._run.log({**values, "policy_version": step, "_timestamp": time_s})

    def rewind(self, step: int) -> None:
        """The summary says from where the steps were made again; W&B keeps the points."""
        self._run.summary["resumed_at_step"] = step

    def close(self) -> None:
        """Finish the run; online, wait for the upload."""
        self._run.finish()
