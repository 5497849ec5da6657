"""Decides which tests one pytest-xdist worker runs together, and in which order; reports tests that take too long.

Knows test files by their text, and no single test.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.device import HAS_GPU

HERE = Path(__file__).parent
FIRST = ("engine", "host")  # the longest groups, one for each worker
MAX_CALL_S = 60.0  # of a test without the mark `slow`


@cache
def group_of(path: Path) -> str:
    """Name of the group that a test file belongs to. A group runs on one worker.

    host: these files share one Docker engine, or compare the host before and after with what sandboxes left on it.
    engine: these files share one vLLM server, which takes half a minute to start. On a machine with a GPU, all that
    start engines or runs: they would take the GPU's memory from each other.
    Every other file is a group of its own.
    """
    text = path.read_text()
    if path.is_relative_to(HERE / "sandbox") or "pytest.mark.docker" in text:
        return "host"
    if HAS_GPU and ("pytest.mark.engine" in text or "pytest.mark.e2e" in text):
        return "engine"
    return "engine" if "pytest.mark.engine" in text and "vllm_server" in text else str(path)


@cache
def rank_of(path: Path) -> tuple[int, int]:
    """Position of a file's group: long groups come first, so that no worker waits for a long one at the end.

    The longest deadline in a file says how long its tests are, among files that start processes.
    """
    group, text = group_of(path), path.read_text()
    if group in FIRST:
        return FIRST.index(group), 0
    if any(f"pytest.mark.{mark}" in text for mark in ("engine", "e2e", "slow")):
        return 2, -max(map(int, re.findall(r"pytest\.mark\.timeout\((\d+)\)", text)), default=0)
    return (3 if path.is_relative_to(HERE / "trainer") else 4), 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of a worker by the rank of their group."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole groups in that order. Needs `--dist loadfile --no-loadscope-reorder`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadGroups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return LoadGroups(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that take longer than MAX_CALL_S and are not marked slow."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    late = [
        report
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call" and report.duration > MAX_CALL_S
    ]
    if late := [report for report in late if not {"slow", "soak"} & set(report.keywords)]:
        terminalreporter.section(f"over {MAX_CALL_S:g} s without the mark `slow`", yellow=True)
        for report in late:
            terminalreporter.write_line(f"{report.duration:.0f}s {report.nodeid}")
