"""Puts what is wrong with a config in sentences: where it stands, what is wrong, what to write instead.

Independent of how a config is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.config import reference
from agentrl.config.suggestions import hint
from agentrl.errors import ConfigError

MAX_VALUE_CHARACTERS = 60
CLOSE_TO_A_CHOICE = 0.7
Places = Mapping[str, str]
"""Dotted key -> where it was given: `my.yaml:7`, `overrides`."""


class InvalidConfig(ConfigError):
    """A config with problems, each of which is one sentence. Example: `InvalidConfig(["a.yaml:3: env.targt: ..."])`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def explained(item: Any, *, source: str, places: Places) -> str:
    """One error of pydantic as a sentence. `source` is the place of what `places` does not have."""
    parts = [str(part) for part in item["loc"]]
    where = ".".join(parts)
    if item["type"] == "extra_forbidden":
        return f"{_place(where, source, places)}: {where}: unknown key; {_known(where)}"
    key = _nearest_key(parts)
    place = _place(where, source, places)
    if item["type"] == "value_error":
        return f"{place}: {f'{where}: ' if where else ''}{item['msg'].removeprefix('Value error, ')}"
    if key is None:
        return f"{place}: {where}: {item['msg']}"
    if item["type"] == "missing":
        return f"{place}: {where} is missing; `agentrl config --describe {where}` explains it"
    value = item.get("input")
    got = "no value" if value is None else _short(repr(value))
    if key.section is not None and len(parts) == key.path.count(".") + 1:
        keys = ", ".join(list(key.section.model_fields)[:3])
        return f"{place}: {key.path} must be a section with keys such as {keys}; got {got}"
    near = difflib.get_close_matches(str(value), key.choices, n=1, cutoff=CLOSE_TO_A_CHOICE) if key.choices else []
    help_ = f"; did you mean {near[0]}?" if near else ""
    help_ += f"; `agentrl config --describe {key.path}` explains them" if key.choices else ""
    kind = f"one of {key.kind.replace(' | ', ', ')}" if key.choices and " | " in key.kind else key.kind
    article = {"i": "an ", "n": "a ", "m": "a "}.get(kind[0], "")
    return f"{place}: {key.path} must be {article}{kind}; got {got}{help_}"


def _place(where: str, source: str, places: Places) -> str:
    """Where the key, or else the nearest section around it, was given."""
    while where and where not in places:
        where = where.rpartition(".")[0]
    return places.get(where, source)


def _nearest_key(parts: Sequence[str]) -> reference.Key | None:
    """The key that an error belongs to: pydantic adds the alternatives of a union and places in a list to its path."""
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        if path in reference.key_paths() or _is_in_named(path):
            return replace(reference.find(path)[0], path=path)
    return None


def _is_in_named(path: str) -> bool:
    """Whether it is a section that the user named, or a key of one."""
    known = {name for section, keys in reference.sections() for name in (section.path, *(key.path for key in keys))}
    return path != (documented := reference.documented(path)) and documented in known


def _known(where: str) -> str:
    """What to write in place of an unknown key."""
    section, _, last = where.rpartition(".")
    if _is_in_named(section):
        inside = sorted(key.name for key in reference.find(section)[1])
        meant = difflib.get_close_matches(last, inside, n=1)
        return f"did you mean {section}.{meant[0]}?" if meant else f"keys of {section}: {', '.join(inside)}"
    paths = reference.key_paths()
    if close := hint(where, paths):
        return close
    inside = sorted(path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == section)
    return f"keys of {section or 'a config'}: {', '.join(inside)}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
