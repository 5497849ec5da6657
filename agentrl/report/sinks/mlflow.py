"""MLflow: a SQLite file in the run's folder `mlflow/`, unless MLFLOW_TRACKING_URI names a server or another store.

`mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db` (of the whole mlflow package) draws it. A resumed run
continues the same run. MLflow cannot take points back: after a rewind the repeated steps have two points, and the later
one is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from agentrl.report.sinks.base import flat_config
from agentrl.run_folder import RunFolder, write_atomically

EXPERIMENT = "agentrl"  # unless MLFLOW_EXPERIMENT_NAME is set
MAX_PARAMS = 100  # of one request
MAX_PARAM_CHARS = 500  # older servers take no more


class MlflowSink:
    """One run of MLflow.

    Example:
        sink = MlflowSink(run_folder)
    """

    def __init__(self, run: RunFolder) -> None:
        folder = (run.path / "mlflow").resolve()
        folder.mkdir(exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._continued(folder) or self._created(folder, run)

    def _continued(self, folder: os.PathLike[str]) -> str | None:
        """The run that this folder has at this store already, made to run again."""
        try:
            with open(os.path.join(folder, "run_id"), encoding="utf-8") as file:
                found = file.read()
            self._client.update_run(found, status="RUNNING")
        except FileNotFoundError:
            return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None  # MLFLOW_TRACKING_URI is another store now
        return found

    def _created(self, folder: os.PathLike[str], run: RunFolder) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made: str = self._client.create_run(experiment_id, run_name=run.path.name).info.run_id
        params = [Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in flat_config(run).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(made, params=params[start : start + MAX_PARAMS])
        write_atomically(run.path / "mlflow" / "run_id", made.encode())
        return made

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """All values in one request."""
        at_ms = int(1000 * time_s)
        self._client.log_batch(self._id, metrics=[Metric(name, value, at_ms, step) for name, value in values.items()])

    def rewind(self, step: int) -> None:
        """The run's tags say from where the steps were made again; MLflow keeps the points."""
        self._client.set_tag(self._id, "resumed_at_step", step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
