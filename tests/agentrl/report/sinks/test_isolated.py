"""A sink that fails in any way neither stops nor slows the run. The test writes its library, a broken `wandb`."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import parse
from agentrl.config.reference import find
from agentrl.errors import ConfigError, MissingDependencyError
from agentrl.report import metrics
from agentrl.report.metrics import MetricsLog
from agentrl.report.sinks import isolated
from agentrl.report.sinks.base import SINKS, check_installed
from agentrl.run_folder import RunFolder
from tests.agentrl.report.synthetic_run import make_config
from tests.agentrl.training.troubles import Trouble

FAILED = Trouble("metrics sink ...: ... The run continues, and metrics.jsonl has every line")
LACKS = Trouble("metrics sink ... lacks ... lines of metrics; metrics.jsonl has all")
LIBRARY = """
    import os, time

    print("noise of the library")

    class Settings:
        def __init__(self, **_): ...

    def once(name):  # whether this is the first call in any process
        try:
            os.mkdir(os.path.join(os.environ["MARKS"], name))
        except FileExistsError:
            return False
        return True

    class Run:
        summary = {}
        def define_metric(self, *_, **__): ...
        def log(self, values):
            LOG
            with open(os.path.join(os.environ["MARKS"], "lines"), "a") as file:
                print(values["policy_version"], file=file)
        def finish(self):
            FINISH

    def init(**_):
        INIT
        return Run()
"""
Break = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", config=make_config())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Writes the library, with the given code in the places of its functions; attempts follow at once."""
    monkeypatch.setattr(isolated, "RETRY_AFTER_S", (0.0, 0.0))
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'library'}:{Path(__file__).parents[4]}")

    def write(*, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
        (tmp_path / "marks").mkdir()
        (tmp_path / "library").mkdir()
        text = textwrap.dedent(LIBRARY).replace("INIT", init).replace("LOG", log).replace("FINISH", finish)
        (tmp_path / "library" / "wandb.py").write_text(text)

    return write


def taken(folder: RunFolder) -> list[int]:
    """The steps that the library got."""
    file = folder.path.parent / "marks" / "lines"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def log_steps(folder: RunFolder, *, num_steps: int = 3) -> None:
    with MetricsLog(folder, sinks=["wandb"]) as log:
        for step in range(1, num_steps + 1):
            log.log("step", step, {"a": step})
    assert [line.step for line in metrics.read(folder.metrics)] == [*range(1, num_steps + 1)]


def test_every_line_arrives_in_order_and_what_the_library_prints_is_in_its_log(
    folder: RunFolder, library: Break, capfd: pytest.CaptureFixture[str]
) -> None:
    library()
    log_steps(folder)
    assert taken(folder) == [1, 2, 3]
    assert "noise of the library" in (folder.logs / "wandb.log").read_text()
    assert "noise" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "failure",
    [{"log": 'assert not once("failed"), "no network"'}, {"log": 'if once("died"): os._exit(3)'}],
    ids=["raises", "dies"],
)
def test_a_sink_that_fails_once_is_tried_again_and_loses_nothing(
    folder: RunFolder, library: Break, failure: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(**failure)
    monkeypatch.setattr(isolated.IsolatedSink, "close", when_delivered(isolated.IsolatedSink.close))
    log_steps(folder)
    assert taken(folder) == [1, 2, 3]


def when_delivered(close: Callable[[isolated.IsolatedSink], None]) -> Callable[[isolated.IsolatedSink], None]:
    """A `close` that lets all attempts be made, which closing ends."""

    def patient(sink: isolated.IsolatedSink) -> None:
        sink._requests.put(None)
        sink._thread.join(60)
        close(sink)

    return patient


@pytest.mark.parametrize(
    ("failure", "says", "num_taken"),
    [
        ({"init": 'raise OSError("no route to host")'}, "OSError: no route to host", 0),
        ({"init": "time.sleep(1000)"}, "no answer within 0.5 s", 0),
        ({"log": "if values['policy_version'] == 2: time.sleep(1000)"}, "no answer within 2 s", 1),
        ({"log": "os._exit(3)"}, "its process died", 0),
        ({"finish": "time.sleep(1000)"}, "did not finish within 0.5 s", 3),
    ],
    ids=["start raises", "start hangs", "line hangs", "dies", "close hangs"],
)
def test_a_broken_sink_is_warned_about_once_with_what_to_do_and_ends(
    folder: RunFolder,
    library: Break,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    failure: dict[str, str],
    says: str,
    num_taken: int,
) -> None:
    library(**failure)
    close = isolated.IsolatedSink.close
    if "no answer" in says:
        name, limit_s = ("START_TIMEOUT_S", 0.5) if "init" in failure else ("CALL_TIMEOUT_S", 2.0)
        monkeypatch.setattr(isolated, name, limit_s)
    if "finish" in failure:

        def close_late(sink: isolated.IsolatedSink) -> None:
            while len(taken(folder)) < 3:  # the deadline is for closing alone
                sink._thread.join(0.05)
            monkeypatch.setattr(isolated, "CLOSE_TIMEOUT_S", 0.5)
            close(sink)

        monkeypatch.setattr(isolated.IsolatedSink, "close", close_late)
    else:
        monkeypatch.setattr(isolated.IsolatedSink, "close", when_delivered(close))
    with caplog.at_level(logging.WARNING):
        log_steps(folder)
    warnings = [record.getMessage() for record in caplog.records]
    first = warnings[0]
    assert FAILED.is_in(first) and says in first and "logs/wandb.log" in first
    assert taken(folder) == [1, 2, 3][:num_taken]
    lost = [f"metrics sink wandb lacks {3 - num_taken} lines of metrics; metrics.jsonl has all"]
    assert warnings[1:] == (lost if num_taken < 3 else [])


def test_a_sink_whose_run_died_during_a_line_is_closed(folder: RunFolder, library: Break) -> None:
    library(log="time.sleep(0.5)", finish="once('finished')")
    process = isolated.SinkProcess("wandb", folder)
    process.start().send(("write", 1, 0.0, {"a": 1.0}))
    process.close()
    assert taken(folder) == [1]
    assert (folder.path.parent / "marks" / "finished").exists()


def test_a_full_queue_loses_lines_and_not_time(
    folder: RunFolder, library: Break, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(init="time.sleep(1000)")
    monkeypatch.setattr(isolated, "MAX_WAITING", 5)
    monkeypatch.setattr(isolated, "CLOSE_TIMEOUT_S", 0.1)
    with caplog.at_level(logging.WARNING):
        log_steps(folder, num_steps=50)
    last = caplog.records[-1].getMessage()
    assert LACKS.is_in(last) and "lacks 50 lines" in last


def test_a_sink_in_this_process_that_fails_is_warned_about_once(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.tensorboard.write_text("a file in the place of the folder")
    with caplog.at_level(logging.WARNING), MetricsLog(folder) as log:
        log.log("step", 1, {"a": 1})
        log.log("step", 2, {"a": 2})
    (warning,) = [record.getMessage() for record in caplog.records if record.name == isolated.__name__]
    assert warning.startswith("metrics sink tensorboard: FileExistsError") and "The run continues" in warning
    assert len(metrics.read(folder.metrics)) == 2


def test_the_names_of_the_config_are_the_sinks() -> None:
    assert list(find("metrics.sinks")[0].choices) == list(SINKS)


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"wandb package is not installed: pip install -e .*\[wandb\]"):
        check_installed(["wandb"])


def test_a_sink_that_is_named_twice_is_refused() -> None:
    tree = {"name": "x", "env": {"target": "a:B"}, "model": {"path": "m"}, "metrics": {"sinks": ["mlflow", "mlflow"]}}
    with pytest.raises(ConfigError, match="names one twice: mlflow, mlflow"):
        parse(tree, source="test")


def test_no_library_of_a_sink_is_imported_before_it_is_named() -> None:
    code = (
        "import sys, agentrl.cli.main, agentrl.training.run, agentrl.report.metrics;"
        "assert not {'wandb', 'trackio', 'mlflow', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
