"""`agentrl orchestrator` and `agentrl learner`: what they refuse, and which run they continue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import config
from agentrl.buffer.journal import Journal
from agentrl.cli import services
from agentrl.cli.main import app
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.run_folder import RunFolder
from agentrl.training.resume import reopen

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AGENTRL_") and "TOKEN" in name]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize(
    "command", [["orchestrator", str(QUICKSTART), "--host", "0.0.0.0"], ["learner", "config.json"]]
)
def test_without_the_run_s_token_neither_begins(command: list[str]) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "set AGENTRL_TOKEN" in done.stderr


def make_run(tmp_path: Path, **overrides: object) -> tuple[Config, RunFolder]:
    changes = [f"out_dir={tmp_path}", "train.steps=3", *(f"{key}={value}" for key, value in overrides.items())]
    settings = config.load(QUICKSTART, changes)
    return settings, RunFolder.create(settings.out_dir, settings.name, config=settings)


def test_the_link_leads_to_the_newest_run_wherever_both_are_seen_from(tmp_path: Path) -> None:
    settings, first = make_run(tmp_path / "here")
    second = RunFolder.create(settings.out_dir, settings.name, config=settings)
    link = tmp_path / "here" / "latest"
    for run in (first, second, second):
        services.point(link, run.path)
    (tmp_path / "here").rename(tmp_path / "there")
    assert (tmp_path / "there" / "latest" / "config.json").resolve().parent.name == second.path.name
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["latest", "quickstart", "quickstart-2"]


def test_a_link_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--latest: cannot make the link"):
        services.point(tmp_path / "nowhere" / "latest", tmp_path)


def test_a_run_that_never_began_or_would_become_another_does_not_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, run = make_run(tmp_path)
    assert services.unfinished(run.path, settings) is None
    assert "starting a new run" in capsys.readouterr().out
    other = settings.model_copy(update={"seed": 1})
    assert services.unfinished(run.path, other) is None
    assert "seed cannot change" in capsys.readouterr().out
    assert services.unfinished(tmp_path / "latest", settings) is None


def test_a_run_that_was_cut_off_goes_on_with_the_settings_that_may_change(tmp_path: Path) -> None:
    settings, run = make_run(tmp_path)
    Journal(run.journal).close()
    longer = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 9})})
    assert services.unfinished(run.path, longer) == RunFolder.open(run.path.resolve())
    assert config.load(run.config).train.steps == 9


def test_train_continues_the_run_that_its_link_leads_to(tmp_path: Path) -> None:
    _, run = make_run(tmp_path)
    Journal(run.journal).close()
    services.point(tmp_path / "latest", run.path)
    changes = [f"out_dir={tmp_path}", "train.steps=9"]
    wanted = config.load(QUICKSTART, changes)
    found = services.unfinished(tmp_path / "latest", wanted)
    assert found == RunFolder.open(run.path.resolve())
    assert reopen(found.path, ()) == (found, wanted)
    assert services.unfinished(None, wanted) is None
