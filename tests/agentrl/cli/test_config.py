"""`agentrl config`: the resolved config is one that the loader reads again; wrong uses say what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import Config, load
from agentrl.errors import ConfigError

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


def test_the_printed_config_has_every_key_and_is_the_same_config_again(tmp_path: Path) -> None:
    overrides = ["train.steps=3", "learner.lr=1e-6", "env.wrappers=[{TimeLimit: {turns: 4}}]"]
    done = CliRunner().invoke(app, ["config", QUICKSTART, *overrides])
    assert done.exit_code == 0
    printed = yaml.safe_load(done.stdout)
    assert set(printed) == set(Config.model_fields)
    (copy := tmp_path / "copy.yaml").write_text(done.stdout)
    assert load(copy) == load(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["algorithm.treatment"], "agentrl config --describe algorithm.treatment"),
        (["nowhere.yaml"], "cannot read config nowhere.yaml"),
        ([QUICKSTART, "--describe", "algorithm"], "give one of CONFIG, --describe KEY"),
        (["--describe", "algorithm.treatmnt"], "did you mean algorithm.treatment"),
    ],
)
def test_a_wrong_use_says_what_to_write(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["config", *arguments, "--debug"])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
