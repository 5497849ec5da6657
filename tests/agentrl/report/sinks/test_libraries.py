"""The real libraries, offline: what they wrote is read back, and a resumed run is the same run.

They are not in the lock (docs/decisions.md); `make test-sinks` runs this in an environment that has them.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.report.metrics import MetricsLog
from agentrl.report.sinks import isolated
from agentrl.run_folder import RunFolder
from tests.agentrl.report.synthetic_run import make_config

pytestmark = pytest.mark.timeout(600)
Points = list[tuple[str, int, float]]  # name, step, value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "TRACKIO_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(isolated, "CLOSE_TIMEOUT_S", 500.0)  # MLflow makes its database first
    return RunFolder.create(tmp_path, "run", config=make_config())


def train_and_resume(folder: RunFolder, name: str) -> None:
    """Three steps, of which the third is made again with another value after a resume."""
    with MetricsLog(folder, sinks=[name]) as log:
        for step in (1, 2, 3):
            log.log("step", step, {"learner/kl": step / 4, "rollout/reward_mean": 0.5})
    with MetricsLog(folder, sinks=[name]) as log:
        log.rewind(2)
        log.log("step", 3, {"learner/kl": 9.0})


EXPECTED = [("learner/kl", 1, 0.25), ("learner/kl", 2, 0.5), ("learner/kl", 3, 0.75), ("learner/kl", 3, 9.0)]


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, which is a LevelDB log: blocks of 32 KiB, chunks of crc, length and type."""
    data, record, at = path.read_bytes(), b"", 7  # after the file's own header
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            yield record
            record = b""


def test_wandb(folder: RunFolder) -> None:
    pytest.importorskip("wandb", reason="make test-sinks has it")
    from wandb.proto.wandb_internal_pb2 import Record

    train_and_resume(folder, "wandb")
    files = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    points: Points = []
    runs = []
    for file in files:
        for data in leveldb_records(file):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                runs.append((record.run.run_id, record.run.project, record.run.display_name))
                assert config["env.target"] == make_config().env.target
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                points.append(("learner/kl", row["policy_version"], row["learner/kl"]))
    assert points == EXPECTED
    run_id = (folder.path / "wandb" / "run_id").read_text()
    assert set(runs) == {(run_id, "agentrl", "run")}


def test_trackio(folder: RunFolder) -> None:
    pytest.importorskip("trackio", reason="make test-sinks has it")
    train_and_resume(folder, "trackio")
    with sqlite3.connect(folder.path / "trackio" / "agentrl.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    points = [("learner/kl", step, json.loads(values)["learner/kl"]) for _, step, values in rows]
    assert points == EXPECTED
    assert {name for name, _, _ in rows} == {f"run-{(folder.path / 'trackio' / 'run_id').read_text()}"}
    assert json.loads(configs[0][0])["env.target"] == make_config().env.target


def test_mlflow(folder: RunFolder) -> None:
    mlflow = pytest.importorskip("mlflow", reason="make test-sinks has it")
    train_and_resume(folder, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.path}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
    history = client.get_metric_history(run.info.run_id, "learner/kl")
    points = [
        (metric.key, metric.step, metric.value) for metric in sorted(history, key=lambda metric: metric.timestamp)
    ]
    assert points == EXPECTED
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["env.target"] == make_config().env.target
