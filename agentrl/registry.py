"""How an environment is found and made: registered ids, `module:Class`, files. Knows nothing of playing one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.base_env import Env
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

_REGISTRY: dict[str, type[Env]] = {}
E = TypeVar("E", bound=type[Env])


def register(env_id: str) -> Callable[[E], E]:
    """Class decorator: makes the class available to `make` and to configs under an id such as `AimePython-v0`."""

    def decorate(cls: E) -> E:
        known = _REGISTRY.get(env_id)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"environment id {env_id!r} is taken by {known.__module__}:{known.__qualname__}")
        _REGISTRY[env_id] = cls
        return cls

    return decorate


def make(target: str | type[Env], *, sandbox: SandboxClient | None = None, **kwargs: Any) -> Env:
    """A new environment for one episode; `kwargs` go to its constructor."""
    cls = load_env_class(target) if isinstance(target, str) else target
    try:
        env = cls(**kwargs)
    except TypeError as error:
        raise ConfigError(f"cannot make {cls.__name__}: {error}") from error
    env._sandbox = sandbox
    return env


def load_env_class(target: str) -> type[Env]:
    """Find a class by `module:Class`, `path/to/file.py:Class`, or registered id. Raises ConfigError with the mend."""
    place, separator, name = target.rpartition(":")
    if not separator:
        return _registered(target)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Env):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise ConfigError(f"{target} is abstract: it does not define {missing}")
        return found
    classes = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Env)]
    what = "is not an Env class" if found is not None else "does not exist"
    raise ConfigError(f"{target}: {name!r} {what}{_suggest(name, classes)}")


def _registered(env_id: str) -> type[Env]:
    if env_id not in _REGISTRY:
        import envs

        for info in pkgutil.iter_modules(envs.__path__):
            importlib.import_module(f"envs.{info.name}")
    if env_id not in _REGISTRY:
        raise ConfigError(
            f"there is no environment {env_id!r}{_suggest(env_id, list(_REGISTRY))}; "
            "your own: module:Class or path/to/file.py:Class"
        )
    return _REGISTRY[env_id]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {name!r} on the import path; a file is given as path/to/file.py:Class"
            ) from error
        raise ConfigError(f"cannot import {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"agentrl_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: type hints are resolved through sys.modules
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    return module


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
