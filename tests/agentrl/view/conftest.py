"""One run, trained once for all tests of the viewer: four steps of two groups of four, measured before, after two, and
at the end."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.run_folder import RunFolder
from agentrl.tokens.tokenizer import TurnTokenizer
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: TurnTokenizer) -> RunFolder:
    """To be read only."""
    folder = tmp_path_factory.mktemp("view")
    with ThreadPoolExecutor(1) as pool:  # the event loop of a test, or of Playwright, may run in this thread
        pool.submit(asyncio.run, run_with(make_config(folder), YesAndNo(tokenizer), tokenizer)).result()
    return RunFolder.open(folder / "t")


@pytest.fixture
def run(trained: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy, which a test may change."""
    shutil.copytree(trained.path, tmp_path / "t")
    return RunFolder.open(tmp_path / "t")
