"""`agentrl env new`: copies an example environment under a new name. Independent of what the example does."""

from __future__ import annotations

import inspect
import keyword
import re
from pathlib import Path

from agentrl.errors import ConfigError


def write_environment(name: str, folder: Path, *, tool: bool) -> tuple[Path, str]:
    """Write `folder/snake_case.py`. Returns the path and the name of the class. Raises ConfigError; never overwrites.

    Example:
        path, class_name = write_environment("RiverCrossing", Path("."), tool=True)
    """
    from agentrl.cli.templates import dialogue_environment, tool_environment

    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+", name)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    if not re.fullmatch(r"[A-Za-z0-9_\- ]+", name) or not class_name.isidentifier() or keyword.iskeyword(class_name):
        raise ConfigError(f"{name!r} makes no class name; write letters and digits, such as RiverCrossing")
    path = folder / ("_".join(words).lower() + ".py")
    example = tool_environment.PriceShop if tool else dialogue_environment.GuessNumber
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_renamed(example, class_name, path))
    except FileExistsError:
        raise ConfigError(f"{path} exists already; nothing is overwritten: take another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path, class_name


def _renamed(example: type, class_name: str, path: Path) -> str:
    """The source of the example's module, with its class and its file name replaced."""
    module = inspect.getmodule(example)
    assert module is not None
    text = inspect.getsource(module)
    own_path = re.search(r"agentrl env check (\S+\.py):", text)
    assert own_path is not None
    return text.replace(own_path[1], str(path)).replace(example.__name__, class_name)
