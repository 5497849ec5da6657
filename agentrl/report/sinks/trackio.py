"""trackio: a local SQLite file in the run's folder `trackio/`, unless TRACKIO_DIR names another folder.

`TRACKIO_DIR=RUN/trackio trackio show` draws it. A resumed run continues the same run. trackio cannot take points back:
after a rewind the repeated steps have two points, and the later one is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from agentrl.report.sinks.base import flat_config, run_id
from agentrl.run_folder import RunFolder

PROJECT = "agentrl"


class TrackioSink:
    """One run of trackio.

    Example:
        sink = TrackioSink(run_folder)
    """

    def __init__(self, run: RunFolder) -> None:
        name = f"{run.path.name}-{run_id(run, 'trackio')}"  # folders of one name may share a TRACKIO_DIR
        os.environ.setdefault("TRACKIO_DIR", str((run.path / "trackio").resolve()))
        import trackio  # reads TRACKIO_DIR

        self._run = trackio.init(
            project=PROJECT,
            name=name,
            resume="allow",
            config=flat_config(run),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One row of the run's log, with the time at which it arrives here."""
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Nothing: trackio keeps the points of the steps that are made again."""

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
