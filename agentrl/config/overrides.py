"""Writes overrides into a config: `section.key=value` texts, or a dict. Independent of what the keys mean."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.config import reference
from agentrl.config.suggestions import suggestions
from agentrl.config.yaml_text import read_value
from agentrl.errors import ConfigError

PLACE = "overrides"
Overrides = Sequence[str] | Mapping[str, Any]
"""`["learner.lr=1e-4"]`, where values are YAML, or `{"learner.lr": 1e-4}`. A dict in the dict, as in
`{"learner": {"lr": 1e-4}}`, is merged into what is there; under a dotted name it replaces it."""


def apply(tree: dict[str, Any], overrides: Overrides, places: dict[str, str]) -> Iterator[str]:
    """Write the overrides into `tree`, and their place into `places`. Yields a sentence for each that is wrong."""
    if isinstance(overrides, str):
        yield f"overrides={overrides!r} is one text: give a list of them, [{overrides!r}], or a dict"
    elif isinstance(overrides, Mapping):
        yield from _merge(tree, overrides, places)
    elif not isinstance(overrides, Sequence) or not all(isinstance(one, str) for one in overrides):
        yield f"overrides={overrides!r}: give ['train.steps=20'] or {{'train.steps': 20}}"
    else:
        yield from _apply_texts(tree, overrides, places)


def _apply_texts(tree: dict[str, Any], overrides: Sequence[str], places: dict[str, str]) -> Iterator[str]:
    for at, override in enumerate(overrides):
        key, separator, value = override.partition("=")
        if not separator or not all(key.split(".")):
            yield f"{PLACE}: {override!r} is not section.key=value{_meant(overrides, at)}"
            return  # what follows may belong to it
        try:
            read = read_value(value)
        except ConfigError as error:
            yield f"{PLACE}: {override!r}: {error}"
        else:
            yield from _set(tree, key, read, places)


def _merge(
    tree: dict[str, Any], overrides: Mapping[str, Any], places: dict[str, str], prefix: str = ""
) -> Iterator[str]:
    """Set the leaves of a nested dict, and whole values under dotted keys."""
    for key, value in overrides.items():
        if not isinstance(key, str):
            yield f"{PLACE}: the key {prefix}{key!r} is not a text"
        elif isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            yield from _merge(tree[key], value, places, f"{prefix}{key}.")
        else:
            yield from _set(tree, key, copy.deepcopy(value), places, prefix)


def _set(tree: dict[str, Any], key: str, value: Any, places: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Set the value under a dotted key."""
    *sections, last = key.split(".")
    node: Any = tree
    for section in sections:
        node = node.setdefault(section, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        yield f"{PLACE}: {prefix}{key}: {prefix}{'.'.join(sections)} is a value and has no keys"
        return
    node[last] = value
    places[prefix + key] = PLACE
    for number in range(1, len(sections) + 1):
        places.setdefault(prefix + ".".join(sections[:number]), PLACE)


def _meant(overrides: Sequence[str], number: int) -> str:
    """What to write for an argument without `=`, or with a blank or a colon in its place."""
    given, following = overrides[number].replace("..", "."), list(overrides[number + 1 : number + 3])
    key, sign, value = given.partition("=" if "=" in given else ":")
    found = suggestions(key, reference.key_paths())
    if not found:
        return ", such as train.steps=20"
    if not sign:
        value = next((word for word in following if word != "="), "VALUE").removeprefix("=")
        value = "VALUE" if "=" in value else value
    return f": write {found[0]}={value}"
