"""`agentrl.read_run`: what a run left in its folder, as records. The run may be running, killed, or old."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read when asked: each call reads what the run has written by then.

    Example:
        run = agentrl.read_run("runs/quickstart")
        run.config["learner"]["lr"]
    """

    folder: RunFolder

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config as it was saved; `agentrl.train(run.config)` does the same again."""
        config: dict[str, Any] = json.loads(self.folder.config.read_text())
        return config


def read_run(path: str | Path) -> Run:
    """The run in a folder. Raises ConfigError when there is none.

    Example:
        agentrl.read_run("runs/quickstart").config["seed"]
    """
    return Run(RunFolder.open(path))
