"""Writes the file of a new environment from a commented example. Overwrites nothing. Independent of options."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from agentrl.errors import ConfigError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_\- ]*")
SUFFIXES = "My{name} or {name}Game"
OURS = ("agentrl", "envs", "sandbox", "trainer")


def write_environment(name: str, folder: Path, *, tool: bool) -> tuple[Path, str]:
    """Write `folder/snake_case.py`. Returns the path and the name of the class. Raises ConfigError; never overwrites.

    A folder that does not exist is made.

    Example:
        path, class_name = write_environment("RiverCrossing", Path("."), tool=True)
    """
    from agentrl.cli.templates import dialogue_environment, tool_environment

    example = tool_environment.PriceShop if tool else dialogue_environment.GuessNumber
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+", name)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    stem = "_".join(words).lower()
    source = _source(example)
    _check_name(name, class_name, stem, source=source)
    path = folder / f"{stem}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file, _removed_after_an_error(path):
            file.write(_renamed(source, example, class_name, path))
            file.flush()
    except FileExistsError:
        what = path if path.exists() else folder
        raise ConfigError(f"{what} exists already; nothing is overwritten: take another name, or --in FOLDER") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a folder with --in FOLDER") from None
    return path, class_name


@contextmanager
def _removed_after_an_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _check_name(name: str, class_name: str, stem: str, *, source: str) -> None:
    """Raises ConfigError for a name that makes no class, or a file or class that hides another."""
    if name.endswith(".py") or "/" in name:
        folder = f" and its folder with --in {Path(name).parent}" if "/" in name else ""
        raise ConfigError(f"{name!r} makes no class name: give the name alone, {_example(name)}{folder}")
    if not NAME.fullmatch(name) or not class_name.isidentifier() or keyword.iskeyword(class_name):
        raise ConfigError(
            f"{name!r} makes no class name: begin with a letter, then letters, digits, - or _, such as RiverCrossing"
        )
    other = SUFFIXES.format(name=class_name)
    if class_name in dir(builtins) or class_name in _names(source):
        raise ConfigError(
            f"a class {class_name} would hide another that its file uses: take another name, such as {other}"
        )
    if keyword.iskeyword(stem) or stem in sys.stdlib_module_names or _is_installed(stem):
        raise ConfigError(f"a file {stem}.py would hide the Python module {stem}: take another name, such as {other}")
    _check_id(f"{class_name}-v0", other)


def _names(source: str) -> set[str]:
    """Every name that the code uses."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {
        alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return imported | {node.id for node in nodes if isinstance(node, ast.Name)}


def _check_id(env_id: str, other: str) -> None:
    """Raises ConfigError where the id that the example registers is taken."""
    from agentrl.env import specs

    if any(spec.id == env_id for spec in specs()):
        raise ConfigError(f"the environment {env_id} is there already: take another name, such as {other}")


def _is_installed(module: str) -> bool:
    """Whether an installed package, or one of ours, has this name. Other files on the path may hide nothing."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return module in OURS or PathFinder.find_spec(module, folders) is not None


def _example(name: str) -> str:
    """A class name made of what looks like a path."""
    words = re.findall(r"[A-Za-z0-9]+", Path(name).stem)
    return "".join(word[:1].upper() + word[1:] for word in words) or "RiverCrossing"


def _source(example: type) -> str:
    module = inspect.getmodule(example)
    assert module is not None
    return inspect.getsource(module)


def _renamed(text: str, example: type, class_name: str, path: Path) -> str:
    """The source of the example's module, with its class and its file name replaced."""
    own_path = re.search(r"agentrl env check (\S+\.py):", text)
    assert own_path is not None
    return text.replace(own_path[1], str(path)).replace(example.__name__, class_name)
