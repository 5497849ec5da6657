"""Reads a config: YAML or a dict in, overrides, resolved JSON out.

Every problem is named at once: file and line, key, and how to fix it. Reads no environment variables.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config import yaml_text
from agentrl.config.overrides import Overrides, apply
from agentrl.config.problems import InvalidConfig, Places, explained
from agentrl.config.tree import Config
from agentrl.errors import ConfigError

ConfigSource = str | Path | Mapping[str, Any] | Config
"""A YAML or JSON file, a nested dict, or a config."""


def load(source: ConfigSource, overrides: Overrides = ()) -> Config:
    """Read a config, apply the overrides, and check everything.

    Raises ConfigError with the file, the line, the key, and the nearest known key; InvalidConfig where it can be read.

    Example:
        config = load("configs/quickstart.yaml", ["learner.lr=1e-4", "train.steps=20"])
        config = load(config, {"seed": 3})
    """
    if isinstance(source, Config) and not overrides:
        return source
    tree, name, places = _tree(source)
    problems = list(apply(tree, overrides, places))
    try:
        config = parse(tree, source=name, places=places)
    except InvalidConfig as error:
        raise InvalidConfig([*problems, *error.problems]) from None
    if problems:
        raise InvalidConfig(problems)
    return config


def _tree(source: ConfigSource) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The config as plain data, what an error calls it, and the places of its keys."""
    if isinstance(source, Config):
        return source.model_dump(mode="json"), "config", {}
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), "config", {}
    if not isinstance(source, str | Path):
        raise ConfigError(f"a config is a path, a dict or a Config, found {type(source).__name__}")
    path = Path(source)
    tree, lines = yaml_text.read_mapping(_text(path), source=str(path))
    return tree, str(path), {key: f"{path}:{line}" for key, line in lines.items()}


def parse(tree: dict[str, Any], *, source: str, places: Places | None = None) -> Config:
    """Check a plain mapping. Raises InvalidConfig; a problem names the place of its key, or else `source`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [explained(item, source=source, places=places or {}) for item in error.errors(include_url=False)]
        raise InvalidConfig(list(dict.fromkeys(problems))) from None


def save(config: Config, path: Path) -> None:
    """Write the resolved tree as JSON."""
    path.write_text(config.model_dump_json(indent=2) + "\n")


def _text(path: Path) -> str:
    """The text of a config file. Raises ConfigError, which says what to give in its place."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: a config is YAML, such as {yaml_text.EXAMPLE}") from None
    except IsADirectoryError:
        if (path / "config.json").is_file():
            raise ConfigError(f"{path} is a run's folder, not a config; its config is {path}/config.json") from None
        files = [str(file) for file in sorted(path.glob("*.yaml"))[:3]]
        raise ConfigError(f"{path} is a folder: name a YAML file{f', such as {files[0]}' if files else ''}") from None
    except OSError as error:
        if "=" in str(path):
            raise ConfigError(f"the config's file is missing: write it before the keys, CONFIG {path}") from None
        raise ConfigError(f"cannot read config {path}: {error.strerror}{_nearest_file(path)}") from None


def _nearest_file(path: Path) -> str:
    """Where the file may be instead."""
    found = [*path.parent.glob("*.yaml"), *Path("configs").glob("*.yaml")]
    by_stem = {file.stem: file for file in sorted(found, reverse=True)}
    near = difflib.get_close_matches(path.stem, by_stem, n=1)
    return f"; did you mean {by_stem[near[0]]}?" if near else ". Shipped ones are in configs/"
