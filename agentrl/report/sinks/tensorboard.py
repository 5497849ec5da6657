"""TensorBoard: event files in the run's folder `tensorboard/`. See them with `tensorboard --logdir runs`.

After a rewind TensorBoard itself drops the steps that are made again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from agentrl.run_folder import RunFolder


class TensorBoardSink:
    """Writes scalars to an event file, from the library's own thread.

    Example:
        sink = TensorBoardSink(run_folder)
    """

    def __init__(self, run: RunFolder) -> None:
        self._events: Any = EventFileWriter(str(run.tensorboard))

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """One event with all values."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._events.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=scalars)))

    def rewind(self, step: int) -> None:
        """TensorBoard drops what it has of the step after `step` and of later ones."""
        start = SessionLog(status=SessionLog.START)
        self._events.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Flush and close the file."""
        self._events.close()
