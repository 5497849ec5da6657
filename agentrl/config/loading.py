"""Reads a config: YAML in, dotted overrides from the command line, resolved JSON in the run's folder.

An unknown key or name is an error that names the nearest known one. Reads no environment variables.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl.config.section import Section
from agentrl.config.tree import Config
from agentrl.errors import ConfigError

ConfigSource = str | Path | Mapping[str, Any] | Config
"""A YAML or JSON file, a nested dict, or a config."""
Overrides = Sequence[str] | Mapping[str, Any]
"""`["learner.lr=1e-4"]`, where values are YAML, or `{"learner.lr": 1e-4}`. A dict in the dict, as in
`{"learner": {"lr": 1e-4}}`, is merged into what is there; under a dotted name it replaces it."""


def load(source: ConfigSource, overrides: Overrides = ()) -> Config:
    """Read a config, apply the overrides, and check everything.

    Raises ConfigError with the file, the key, and the nearest known key.

    Example:
        config = load("configs/quickstart.yaml", ["learner.lr=1e-4", "train.steps=20"])
        config = load(config, {"seed": 3})
    """
    if isinstance(source, Config) and not overrides:
        return source
    tree, name = _tree(source)
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is one text: give a list of them, [{overrides!r}], or a dict")
    if isinstance(overrides, Mapping):
        _merge(tree, overrides)
    else:
        for override in overrides:
            _apply_override(tree, override)
    return parse(tree, source=name)


def _tree(source: ConfigSource) -> tuple[dict[str, Any], str]:
    """The config as plain data, and what an error calls it."""
    if isinstance(source, Config):
        return source.model_dump(mode="json"), "config"
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), "config"
    return _read(Path(source)), str(source)


def _read(path: Path) -> dict[str, Any]:
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
    return tree


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
    try:
        _set(tree, key, yaml.safe_load(value), said=override)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _set(tree: dict[str, Any], key: str, value: Any, *, said: str) -> None:
    """Set the value under a dotted key."""
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {said!r}: {section!r} is a value, not a section")
        node = child
    node[last] = value


def _merge(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set the leaves of a nested dict, and whole values under dotted keys."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            _set(tree, key, copy.deepcopy(value), said=key)


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
