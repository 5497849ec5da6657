"""Reads a config: YAML in, dotted overrides from the command line, resolved JSON in the run's folder.

An unknown key or name is an error that names the nearest known one. Reads no environment variables.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl.config.section import Section
from agentrl.config.tree import Config
from agentrl.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides (values are YAML), and check everything.

    Raises ConfigError with the file, the key, and the nearest known key.

    Example:
        config = load("configs/quickstart.yaml", ["learner.lr=1e-4", "train.steps=20"])
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}. Shipped ones are in configs/.") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, found {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return parse(tree, source=str(path))


def parse(tree: dict[str, Any], *, source: str) -> Config:
    """Check a plain mapping. Raises ConfigError, which names `source`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n" + "\n".join(_explain(item) for item in error.errors())) from None


def save(config: Config, path: Path) -> None:
    """Write the resolved tree as JSON."""
    path.write_text(config.model_dump_json(indent=2) + "\n")


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _explain(item: Any) -> str:
    """One pydantic error as a sentence that says how to fix it."""
    where = ".".join(str(part) for part in item["loc"]) or "config"
    if item["type"] != "extra_forbidden":
        help_ = f"; `agentrl config --describe {where}` says what they mean" if item["type"] == "literal_error" else ""
        return f"  {where}: {item['msg'].removeprefix('Value error, ')} (got {_shorten(item.get('input'))}){help_}"
    known = _known_keys(item["loc"][:-1])
    near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"  {where}: unknown key; {hint}"


def _known_keys(location: Sequence[Any]) -> list[str]:
    model: Any = Config
    for part in location:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return list(model.model_fields)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
