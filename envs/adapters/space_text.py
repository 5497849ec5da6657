"""Gymnasium's spaces in words: an observation as text, an action read from the model's message.

Independent of environments and episodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from agentrl.errors import ConfigError

_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class NoAction(ValueError):
    """The message has no action of the space. The text tells the model what is expected."""


def plain(text: str) -> str:
    """A terminal's picture without its escape codes; coloured text is put into [brackets]."""
    return _ANSI.sub("", _HIGHLIGHT.sub(r"[\1]", text)).strip("\n")


def refuse_observation(space: Space[Any]) -> None:
    """Raises ConfigError, which names the space, for observations that cannot be written as text."""
    for part in _leaves(space):
        if not isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text):
            raise ConfigError(
                f"observations of {part} have no text: give from_gymnasium(..., describe=FUNCTION) that turns an "
                "observation into text, or choose an environment with the render mode 'ansi'"
            )


def refuse_action(space: Space[Any]) -> None:
    """Raises ConfigError, which names the space, for actions that a model cannot write as text."""
    for part in _leaves(space):
        if not isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text):
            raise ConfigError(f"actions of {part} cannot be written as text: only discrete and text actions can")


def describe(space: Space[Any], value: Any) -> str:
    """An observation as text: numbers and words as they are, several of them as JSON."""
    data = _jsonable(space, value)
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)


def how_to_act(space: Space[Any], names: Sequence[str]) -> str:
    """One sentence for the model that says what its answer must end with."""
    if isinstance(space, spaces.Text):
        return "Your whole answer is the action."
    if isinstance(space, spaces.Discrete):
        return f"End your answer with a line that holds one of these actions and nothing else: {', '.join(names)}."
    return f"End your answer with a line that holds the action as JSON and nothing else, such as {_example(space)}."


def action_names(space: Space[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Names of a Discrete space's actions, in order: those given, or numbers. Raises ConfigError if they do not fit."""
    if not isinstance(space, spaces.Discrete):
        return ()
    first, count = int(space.start), int(space.n)
    if names and len(names) != count:
        raise ConfigError(f"action_names has {len(names)} names, the environment has {count} actions")
    return tuple(names) or tuple(str(first + i) for i in range(count))


def read_action(space: Space[Any], names: Sequence[str], text: str) -> Any:
    """The action that the last line of a message names. Raises NoAction."""
    if isinstance(space, spaces.Text):
        if not space.contains(text):
            raise NoAction(f"that is not allowed as an action: {space.min_length} to {space.max_length} characters")
        return text
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    action = _discrete(space, names, last) if isinstance(space, spaces.Discrete) else _composite(space, last)
    if action is None or not space.contains(action):
        raise NoAction(f"no action in your last line. {how_to_act(space, names)}")
    return action


def _discrete(space: spaces.Discrete, names: Sequence[str], line: str) -> Any:
    said = re.sub(r"^action\s*:\s*", "", line, flags=re.IGNORECASE).strip(" .!*`'\"").casefold()
    known = {name.casefold(): space.start + i for i, name in enumerate(names)}
    numbers = {str(space.start + i): space.start + i for i in range(int(space.n))}
    found = known.get(said, numbers.get(said))
    return None if found is None else space.dtype.type(found)


def _composite(space: Space[Any], line: str) -> Any:
    try:
        return _typed(space, json.loads(line))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _typed(space: Space[Any], data: Any) -> Any:
    match space:
        case spaces.Tuple():
            return tuple(_typed(part, item) for part, item in zip(space.spaces, data, strict=True))
        case spaces.Dict():
            if set(data) != set(space.spaces):
                raise KeyError
            return {key: _typed(part, data[key]) for key, part in space.spaces.items()}
        case spaces.Text():
            return data
        case spaces.Discrete():
            return space.dtype.type(_whole(data))
        case _:
            array = np.array(data)
            if array.dtype.kind not in "iub" or array.shape != space.shape:
                raise ValueError
            return array.astype(space.dtype)


def _whole(data: Any) -> int:
    if not isinstance(data, int):
        raise TypeError
    return data


def _jsonable(space: Space[Any], value: Any) -> Any:
    match space:
        case spaces.Tuple():
            return [_jsonable(part, item) for part, item in zip(space.spaces, value, strict=True)]
        case spaces.Dict():
            return {key: _jsonable(part, value[key]) for key, part in space.spaces.items()}
        case spaces.Text():
            return str(value)
        case _:
            return np.asarray(value).tolist()


def _leaves(space: Space[Any]) -> list[Space[Any]]:
    match space:
        case spaces.Tuple():
            return [leaf for part in space.spaces for leaf in _leaves(part)]
        case spaces.Dict():
            return [leaf for part in space.spaces.values() for leaf in _leaves(part)]
        case _:
            return [space]


def _example(space: Space[Any]) -> str:
    match space:
        case spaces.Tuple():
            return f"[{', '.join(_example(part) for part in space.spaces)}]"
        case spaces.Dict():
            return "{" + ", ".join(f'"{key}": {_example(part)}' for key, part in space.spaces.items()) + "}"
        case spaces.Text():
            return '"text"'
        case spaces.Discrete():
            return str(space.start)
        case spaces.MultiDiscrete():
            return json.dumps(np.asarray(space.start).tolist())
        case _:
            return json.dumps(np.zeros(space.shape or (), dtype=int).tolist())
