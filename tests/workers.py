"""Which tests of `make test` one worker takes together. Knows files by their text and pytest-xdist, and no test."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FIRST = ("engine", "host")  # the long ones, one for each worker


@cache
def group_of(path: Path) -> str:
    """Of a test file.

    host: they share one Docker engine, or compare the host before and after with what sandboxes left on it.
    engine: they share one vLLM, and two that start side by side take twice as long.
    All others are a group by themselves.
    """
    text = path.read_text()
    if path.is_relative_to(HERE / "sandbox") or "pytest.mark.docker" in text:
        return "host"
    return "engine" if "pytest.mark.engine" in text else str(path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long groups first: whoever has nothing to do at the end waits for one short file."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [group_of(item.path) != group for group in FIRST])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2 --dist loadfile --no-loadscope-reorder`: whole groups, in the order above."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return LoadGroups(config, log)
