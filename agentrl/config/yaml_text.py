"""Reads YAML so that every problem has a line: syntax, tabs, keys given twice; and where each key stands.

Independent of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from agentrl.errors import ConfigError

Lines = dict[str, int]
"""Dotted key -> its line, from 1."""


def read_mapping(text: str, *, source: str) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML document, and the lines of its keys. Raises ConfigError with `source` and the line.

    Example:
        >>> read_mapping("env: {target: A}", source="my.yaml")
        ({'env': {'target': 'A'}}, {'env': 1, 'env.target': 1})
    """
    tree, lines = None, Lines()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            for key, line in _keys(node, "", set()):
                if key in lines:
                    raise ConfigError(f"{source}:{line}: {key} is given twice, first in line {lines[key]}: merge them")
                lines[key] = line
            tree = loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}{_problem(error, text)}") from None
    if tree is None:
        raise ConfigError(f"{source} is empty: it needs at least name, env.target and model.path; see {EXAMPLE}")
    if not isinstance(tree, dict):
        kind = {"list": "a list", "str": "text"}.get(type(tree).__name__, f"a {type(tree).__name__}")
        raise ConfigError(f"{source} holds {kind}, and a config is sections of `key: value`; see {EXAMPLE}")
    return tree, lines


EXAMPLE = "configs/quickstart.yaml"


def read_value(text: str) -> Any:
    """The value of an override: YAML. Raises ConfigError, which says only what is wrong with the text."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        said = getattr(error, "problem", None) or error
        raise ConfigError(f"the value is not valid YAML ({said}); quote what the shell would split") from None


def _problem(error: Exception, text: str) -> str:
    """`:LINE: what is wrong`, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": not valid YAML: {' '.join(str(error).split())}"
    line = error.problem_mark.line
    written = text.splitlines()[line] if line < len(text.splitlines()) else ""
    if written[: len(written) - len(written.lstrip())].count("\t"):
        return f":{line + 1}: not valid YAML: a tab; indent with spaces"
    begun = error.context_mark
    context = f" ({error.context}, begun in line {begun.line + 1})" if begun and begun.line != line else ""
    return f":{line + 1}: not valid YAML: {error.problem}{context}"


def _keys(node: yaml.Node, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Every key of the mappings inside, as dotted names with lines. Elements of lists have no names."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
            continue
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        yield from _keys(value, f"{path}.", seen | {id(node)})
