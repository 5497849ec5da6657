"""Which exports of a run are measured, and what is refused. tests/e2e/test_evaluation_beside.py measures some."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.api.checkpoints import _exports, evaluate_checkpoints
from agentrl.buffer.journal import Journal
from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.report.statistics import summarize
from agentrl.run_folder import RunFolder
from agentrl.testing import one_token_group
from agentrl.training.model_folder import Origin, write_origin


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    tree = {"name": "mine", "env": {"target": "envs.modmath:ModMath"}, "model": {"path": "unused"}}
    folder = RunFolder.create(tmp_path, "mine", config=parse(tree, source="test"))
    for name, version in (("step_10", 10), ("step_9", 9), ("final", 10)):
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "config.json").write_text("{}")
        write_origin(folder.checkpoints / name, Origin(run="mine", version=version))
    return folder


def test_each_version_is_measured_once_the_oldest_first(run: RunFolder) -> None:
    found = _exports(run)
    assert list(found) == [9, 10] and found[9].name == "step_9"


def test_what_the_run_has_measured_is_not_measured_again(run: RunFolder) -> None:
    with closing(Journal(run.journal)) as journal:
        for version in (9, 10):
            journal.evaluated(summarize([one_token_group(0, versions=[version] * 2)], policy_version=version))
    assert evaluate_checkpoints(run.path) == [], "no engine was started"
    assert run.report.exists()


def test_what_is_not_of_this_run_is_refused(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="seed cannot change"):
        evaluate_checkpoints(run.path, ["seed=5"])
    with pytest.raises(ConfigError, match=r"'a' is not in the eval.sets of .*mine: none"):
        evaluate_checkpoints(run.path, eval_set="a")
    with run.locked(), pytest.raises(ConfigError, match="is being trained by process"):
        evaluate_checkpoints(run.path)
    for file in run.checkpoints.glob("*/agentrl.json"):
        file.unlink()
    with pytest.raises(ConfigError, match="has exported no weights"):
        evaluate_checkpoints(run.path)


def test_a_run_chooses_its_own_model_and_rows(run: RunFolder) -> None:
    done = CliRunner().invoke(app, ["eval", str(run.path), "--checkpoints", "--data", "GSM8K"])
    assert done.exit_code == 2
    assert "give only --set and keys" in " ".join(done.stderr.replace("│", " ").split())
