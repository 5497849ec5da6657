"""Finds and makes environments: by registered id, `module:Class`, file, or an adapter's scheme.

Independent of how an episode is played.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from agentrl.env import places
from agentrl.env.attribution import SIGNATURES
from agentrl.env.base import Env
from agentrl.env.entry_points import known_schemes, load_adapted, register_installed
from agentrl.errors import AgentRLError, ConfigError, EnvError

if TYPE_CHECKING:
    from sandbox.client import SandboxClient

log = logging.getLogger(__name__)

_FILE_MODULE = "agentrl_user_"
_CHANGED: dict[str, int] = {}
"""When the loaded files had changed last, in ns: a notebook that loads one after an edit gets the new code."""
WrapEnv = Callable[[Env], Env]
"""A wrapper with its arguments: `functools.partial(TimeLimit, turns=4)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """One registered environment.

    Example:
        spec("AimePython-v0").load()
    """

    id: str
    entry_point: str
    """`module:Class`, or `path/to/file.py:Class`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments that belong to the id."""
    env_class: type[Env] | None = field(default=None, repr=False, compare=False)
    """The class itself, if it is imported already."""

    def load(self, kwargs: Mapping[str, Any] | None = None) -> type[Env]:
        """The class, with the arguments of the id and `kwargs`. Raises ConfigError."""
        kwargs = {**self.kwargs, **(kwargs or {})}
        return (
            load_env_class(self.entry_point, kwargs)
            if self.env_class is None
            else checked_class(self.env_class, kwargs)
        )


_SPECS: dict[str, EnvSpec] = {}
E = TypeVar("E", bound=type[Env])


@overload
def register(env_id: str, entry_point: str, *, kwargs: Mapping[str, Any] | None = None) -> None: ...
@overload
def register(env_id: str, *, kwargs: Mapping[str, Any] | None = None) -> Callable[[E], E]: ...
def register(
    env_id: str, entry_point: str | None = None, *, kwargs: Mapping[str, Any] | None = None
) -> Callable[[E], E] | None:
    """Make a class available to `make` and to configs under an id such as `AimePython-v0`.

    A class decorator; with `entry_point`, a call that registers `module:Class`, which is imported when it is needed.
    `kwargs` are constructor arguments that belong to the id. Raises ConfigError when another class has the id.

    Example:
        @register("Capitals-v0")
        class Capitals(ToolEnv): ...
    """
    if entry_point is not None:
        _add(EnvSpec(id=env_id, entry_point=entry_point, kwargs=dict(kwargs or {})))
        return None

    def decorate(cls: E) -> E:
        _add(EnvSpec(id=env_id, entry_point=_place(cls), kwargs=dict(kwargs or {}), env_class=cls))
        return cls

    return decorate


def _add(new: EnvSpec) -> None:
    known = _SPECS.get(new.id, new)
    if _source(known) != _source(new):
        raise ConfigError(f"environment id {new.id!r} is taken by {known.entry_point}")
    _SPECS[new.id] = new


def _source(spec: EnvSpec) -> str:
    """File and name of the class, so that a file loaded by path and imported by name is one source."""
    module = None if spec.env_class is None else sys.modules.get(spec.env_class.__module__)
    if spec.env_class is None or module is None or module.__file__ is None:
        return spec.entry_point
    return f"{Path(module.__file__).resolve()}:{spec.env_class.__qualname__}"


def _place(cls: type) -> str:
    """`module:Class`, or `path/to/file.py:Class` where the module came from a file given as a path."""
    module = sys.modules.get(cls.__module__)
    is_file = cls.__module__.startswith(_FILE_MODULE) and module is not None
    return f"{module.__file__ if is_file and module else cls.__module__}:{cls.__qualname__}"


def spec(env_id: str) -> EnvSpec:
    """The environment with an id. Raises ConfigError, which names the nearest known id."""
    if env_id in _SPECS:
        return _SPECS[env_id]
    failures = register_installed()
    if env_id not in _SPECS:
        known = _suggest(env_id, list(_SPECS)) or "; no installed package registers one: run `make setup`"
        problem = f"there is no environment {env_id!r}{known}; your own: module:Class or path/to/file.py:Class"
        raise ConfigError("\n".join((problem, *failures)))
    return _SPECS[env_id]


def specs() -> list[EnvSpec]:
    """All registered environments, sorted by id: those of installed packages and of modules that were imported.

    Logs a warning for each package whose environments cannot be imported.
    """
    for failure in register_installed():
        log.warning(failure)
    return [_SPECS[env_id] for env_id in sorted(_SPECS)]


def summary(cls: type[Env]) -> str:
    """The first line of a class's documentation, as tables and `agentrl env list` show it."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def make(
    target: str | type[Env],
    *,
    sandbox: SandboxClient | None = None,
    shared: Any = None,
    wrappers: Iterable[WrapEnv] = (),
    **kwargs: Any,
) -> Env:
    """A new environment for one episode. `kwargs` go to its constructor. Raises ConfigError if they do not fit.

    Args:
        target: a class, `module:Class`, `path/to/file.py:Class`, or a registered id.
        sandbox: runs the code of its tools.
        shared: the value of `open_shared`; `agentrl.env.opened` passes it.
        wrappers: around the environment, the innermost first.

    Example:
        env = make("AimePython-v0", sandbox=client)
    """
    cls = load_env_class(target) if isinstance(target, str) else target
    try:
        env = cls(**{**cls.kwargs, **kwargs})
    except AgentRLError:
        raise
    except TypeError as error:
        place = places.in_brackets(places.raised_at(error) or places.defined_at(cls.__init__))
        raise ConfigError(
            f"cannot make {cls.__name__}: {error}: give the arguments in env.kwargs, or with --arg NAME=VALUE{place}"
        ) from error
    except Exception as error:
        place = places.in_brackets(places.raised_at(error))
        raise EnvError(f"{cls.__name__}.__init__: {type(error).__name__}: {error}{place}") from error
    env._sandbox, env._shared = sandbox, shared
    for wrap in wrappers:
        env = wrap(env)
    return env


def load_env_class(target: str, kwargs: Mapping[str, Any] | None = None) -> type[Env]:
    """Find a class by `module:Class`, `path/to/file.py:Class`, registered id, or `SCHEME:REST` of an adapter.

    `kwargs` are constructor arguments that `make` passes; classmethods find them in `cls.kwargs`. Raises ConfigError,
    which says how to fix it.
    """
    if (adapted := load_adapted(target, kwargs or {})) is not None:
        return adapted
    if ":" not in target:
        if target.endswith(".py"):
            raise ConfigError(f"{target} names a file and no class: write {target}:{_classes_in(Path(target))}")
        return spec(target).load(kwargs)
    try:
        found = load_object(target)
    except ObjectNotFound as error:
        if target.partition(":")[0].endswith(".py"):
            raise
        raise ConfigError(f"{error}\n{known_schemes()}") from None
    if not (isinstance(found, type) and issubclass(found, Env)):
        place = places.in_brackets(places.defined_at(found) if isinstance(found, type) else "")
        name = target.rpartition(":")[2]
        raise ConfigError(
            f"{target}: {name!r} is not an Env class: derive it from agentrl.ToolEnv or agentrl.Env, as in "
            f"`class {name}(ToolEnv):`{place}"
        )
    return checked_class(found, kwargs or {})


def _classes_in(path: Path) -> str:
    """The environment in a file, by its text alone; `Class` where that shows none."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return next(iter(re.findall(r"^class (\w+)\(\w*Env\)", text, re.MULTILINE)), "Class")


class ObjectNotFound(ConfigError):
    """There is no such module, or the module has no such name. Example: `load_object("os:Nothing")`."""


def load_object(target: str) -> Any:
    """The object called `module:name` or `path/to/file.py:name`.

    Raises ObjectNotFound or another ConfigError, which say how to fix it.
    """
    place, _, name = target.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        classes = [k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise ObjectNotFound(f"{target}: {name!r} does not exist{_suggest(name, classes)}")
    return found


def checked_class(cls: type[Env], kwargs: Mapping[str, Any]) -> type[Env]:
    """The class, or a subclass of the same name with `kwargs`. Raises ConfigError if it cannot be used."""
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        place = places.in_brackets(places.defined_at(cls))
        or_derive = ", or derive the class from ToolEnv" if "step" in cls.__abstractmethods__ else ""
        raise ConfigError(
            f"{_place(cls)} is abstract: it does not define {missing}: write {_to_write(cls.__abstractmethods__)}"
            f"{or_derive}{place}"
        )
    _check_attributes(cls)
    if not kwargs:
        return cls
    try:
        inspect.signature(cls.__init__ if cls.__init__ is not object.__init__ else _nothing).bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{cls.__name__} does not take the arguments {dict(kwargs)}: {error}") from error
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**same, "kwargs": {**cls.kwargs, **kwargs}})


def _check_attributes(cls: type[Env]) -> None:
    """Raises ConfigError for a class attribute of another type. A property is read from the object."""
    turns: Any = cls.max_turns
    if not isinstance(turns, property) and (not isinstance(turns, int) or turns < 1):
        raise _wrong_attribute(cls, "max_turns", turns, "a number of turns: `max_turns = 8`")
    weights: Any = cls.reward_weights
    if isinstance(weights, property):
        return
    if not isinstance(weights, Mapping) or not all(isinstance(weight, Real) for weight in weights.values()):
        raise _wrong_attribute(cls, "reward_weights", weights, '`reward_weights = {"correct": 1.0}`')


def _wrong_attribute(cls: type[Env], name: str, value: Any, write: str) -> ConfigError:
    place = places.in_brackets(places.defined_at(cls))
    return ConfigError(f"{cls.__name__}.{name} is {value!r} ({type(value).__name__}): write {write}{place}")


def _nothing(self: object) -> None:
    """The signature of a class without a constructor."""


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ObjectNotFound(
                f"there is no module {name!r} on the import path; a file is given as path/to/file.py:Class"
                + (f", here {name}.py:Class" if Path(f"{name}.py").is_file() or "/" in name else "")
            ) from None
        raise ConfigError(f"cannot import {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _not_loaded(f"cannot import {name}", error) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"{_FILE_MODULE}{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    changed = path.stat().st_mtime_ns
    if name in sys.modules and _CHANGED.get(name) == changed:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _CHANGED[name] = changed
    sys.modules[name] = module  # before execution: type hints are resolved through sys.modules
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # files beside it can be imported; last, so that they hide nothing
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_loaded(f"cannot load {path}", error) from error
    return module


def _not_loaded(what: str, error: BaseException) -> ConfigError:
    """The error for a module whose execution failed, with the line."""
    if isinstance(error, ConfigError):  # of a class in it: it names the place itself
        return ConfigError(f"{what}: {error}")
    problem = error.msg if isinstance(error, SyntaxError) else error
    hint = f"; is {error.name} installed in {sys.prefix}?" if isinstance(error, ModuleNotFoundError) else ""
    return ConfigError(f"{what}: {type(error).__name__}: {problem}{hint}{places.in_brackets(places.raised_at(error))}")


def _to_write(missing: Iterable[str]) -> str:
    return ", ".join(f"`{SIGNATURES.get(name, f'def {name}(self)')}`" for name in sorted(missing))


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
