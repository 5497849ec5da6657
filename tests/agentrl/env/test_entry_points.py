"""What other installed packages register: their environments and adapters are found; a broken one is named."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.env import Env, entry_points, load_env_class, spec, specs
from agentrl.errors import ConfigError

ENV = """
from agentrl.env import Env, register

@register("Installed-v0")
class Installed(Env):
    def __init__(self, *, rest=""):
        self.rest = rest
    async def reset(self, *, task, seed=None): ...
    async def step(self, action): ...

def from_chess(rest, *, colour="white"):
    return type("Adapted", (Installed,), {"kwargs": {"rest": f"{colour} {rest}"}})
"""


def install(folder: Path, name: str, points: str) -> None:
    """As pip leaves a package behind."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, one of which is whole and one broken."""
    (tmp_path / "chess_envs.py").write_text(ENV)
    (tmp_path / "broken_envs.py").write_text("import a_library_that_is_missing")
    install(
        tmp_path,
        "chess",
        "[agentrl.environments]\nchess = chess_envs\n[agentrl.adapters]\nchess = chess_envs:from_chess\n",
    )
    install(
        tmp_path,
        "broken",
        "[agentrl.environments]\nbroken = broken_envs\n[agentrl.adapters]\nbroken = broken_envs:from_broken\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points.register_installed.cache_clear()
    entry_points.adapters.cache_clear()
    yield tmp_path
    entry_points.register_installed.cache_clear()
    entry_points.adapters.cache_clear()


def test_environments_and_adapters_of_installed_packages_are_found(packages: Path) -> None:
    assert issubclass(load_env_class("Installed-v0"), Env)
    assert {"Installed-v0", "ModMath-v0"} <= {known.id for known in specs()}
    assert load_env_class("chess:opening", {"colour": "black"}).kwargs == {"rest": "black opening"}


def test_a_package_that_cannot_be_imported_is_named_and_hides_no_other(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = "broken_envs, an entry point of broken, cannot be loaded: ModuleNotFoundError"
    assert spec("ModMath-v0").id == "ModMath-v0"
    with caplog.at_level(logging.WARNING):
        specs()
    assert broken in caplog.text
    with pytest.raises(ConfigError, match=f"(?s)did you mean 'ModMath-v0'.*{broken}"):
        spec("ModMaths-v0")
    with pytest.raises(ConfigError, match="broken_envs:from_broken, an entry point of broken"):
        load_env_class("broken:anything")


def test_an_option_that_the_adapter_does_not_know_is_a_config_error(packages: Path) -> None:
    with pytest.raises(ConfigError, match=r"chess:opening with env.kwargs=\{'speed': 2\}: .*'speed'"):
        load_env_class("chess:opening", {"speed": 2})


def test_two_packages_cannot_have_the_same_scheme(packages: Path) -> None:
    install(packages, "draughts", "[agentrl.adapters]\nchess = draughts_envs:from_draughts\n")
    entry_points.adapters.cache_clear()
    with pytest.raises(ConfigError, match=r"(?s)the adapter 'chess'.*(chess_envs|draughts_envs).*Uninstall one"):
        load_env_class("chess:opening")


@pytest.mark.parametrize("target", ["gymnasium:FrozenLake-v1", "mcp:https://host:80/path", "envs.modmath:Nothing"])
def test_a_target_of_an_adapter_that_is_not_installed_is_refused_with_the_installed_ones(
    packages: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    installed = entry_points.adapters()
    with monkeypatch.context() as patch:
        patch.setattr(entry_points, "adapters", lambda: {"chess": installed["chess"]})
        with pytest.raises(ConfigError, match=r"(does not exist|there is no module)(?s:.*)installed adapters: chess:"):
            load_env_class(target)
        patch.setattr(entry_points, "adapters", lambda: {})
        with pytest.raises(ConfigError, match=r"no adapter is installed(?s:.*)pip install -e \."):
            load_env_class(target)


def test_a_missing_name_of_a_file_is_no_question_of_adapters(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Installed: ...")
    with pytest.raises(ConfigError, match="does not exist; did you mean 'Installed'") as found:
        load_env_class(f"{tmp_path / 'mine.py'}:Instaled")
    assert "adapter" not in str(found.value)


def test_agentrl_does_not_import_the_environments_that_come_with_it() -> None:
    code = "import sys, agentrl.cli.main, agentrl.training.run; assert 'envs' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
