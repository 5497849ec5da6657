"""The message of a missing package has a command that installs this project's extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agentrl import errors
from agentrl.errors import DISTRIBUTION, MissingDependencyError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_in_a_checkout_the_command_installs_the_extra_from_it() -> None:
    message = str(MissingDependencyError.of_extra("the mcp package is not installed", "mcp"))
    assert message == f"the mcp package is not installed: pip install -e '{ROOT}[mcp]'"


def test_elsewhere_the_command_has_the_name_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "agentrl" / "errors.py"))
    assert PROJECT["name"] == DISTRIBUTION
    assert str(MissingDependencyError.of_extra("no mcp", "mcp")) == f"no mcp: pip install '{DISTRIBUTION}[mcp]'"


def test_every_extra_that_a_message_or_page_names_exists() -> None:
    named = set()
    for folder in ("agentrl", "envs", "trainer", "docs"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            text = path.read_text()
            named |= set(re.findall(r"of_extra\([^)]*?\"(\w+)\"\)", text, re.DOTALL))
            named |= set(re.findall(r"pip install -e '\.\[([\w-]+)\]'", text))
    assert {"mcp", "chat", "data"} <= named <= set(PROJECT["optional-dependencies"])
