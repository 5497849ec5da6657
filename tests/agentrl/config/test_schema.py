"""docs/config.schema.json accepts what the config accepts, refuses what it refuses, and says what the docs say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentrl.config import Config, parse
from agentrl.config.reference import sections
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "docs" / "config.schema.json"
SHIPPED = sorted(ROOT.glob("configs/**/*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
SMALLEST: dict[str, Any] = {"name": "x", "env": {"target": "ModMath-v0"}, "model": {"path": "m"}}


def test_it_is_a_schema_of_draft_2020_12() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_is_valid_and_names_the_schema_for_editors(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert named and (path.parent / named[1]).resolve() == SCHEMA


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("learner", "lrr", 1),
        ("train", "steps", 0),
        ("train", "steps", "many"),
        ("algorithm", "baseline", "oopb"),
        ("env", "wrappers", [{"TimeLimit": {"turns": 4}, "ToolBudget": {"calls": 1}}]),
        ("env", "wrappers", [4]),
    ],
)
def test_what_the_config_refuses_the_schema_refuses(section: str, key: str, value: Any) -> None:
    tree = copy.deepcopy(SMALLEST)
    tree.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError):
        parse(tree, source="test")
    assert not VALIDATOR.is_valid(tree)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("env", "wrappers", ["TurnCounter", {"TimeLimit": {"turns": 4}}, {"name": "ToolBudget", "kwargs": {}}]),
        ("model", "lora", {"rank": 4}),
        ("model", "lora", None),
        ("engine", "url", ["http://a:8000", "http://b:8000"]),
        ("algorithm", "preset", "grpo"),
    ],
)
def test_what_the_config_accepts_the_schema_accepts(section: str, key: str, value: Any) -> None:
    tree = copy.deepcopy(SMALLEST)
    tree.setdefault(section, {})[key] = value
    parse(tree, source="test")
    VALIDATOR.validate(tree)


def test_every_key_and_every_name_of_an_enum_is_described() -> None:
    nodes = {name: node for name, node in VALIDATOR.schema["$defs"].items() if "properties" in node}
    for section, keys in sections():
        assert section.section is not None
        node = VALIDATOR.schema if section.section is Config else nodes.get(section.section.__name__)
        for key in keys if node else ():
            described = node["properties"][key.name]
            assert described["description"].startswith(key.doc)
            if key.choices and "enum" in described:
                assert described["enumDescriptions"] == list(key.choices.values())
                assert described["enum"] == list(key.choices)
        assert node is None or node["additionalProperties"] is False
