"""Every code block of docs/python-api.md runs as it is, and its signatures are those of the functions."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from pathlib import Path

import pytest

import agentrl
from agentrl.supervision.status import StatusFile
from agentrl.supervision.wait_graph import WaitGraph
from agentrl.tokens.tokenizer import TurnTokenizer
from tests.agentrl.cli.test_rollout import ENVIRONMENT, endpoint
from tests.agentrl.training.whole_run import YesAndNo, make_config, run_with

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "python-api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: TurnTokenizer) -> Path:
    """What the page takes for granted: configs, an environment with its config, a run."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shop = ENVIRONMENT.replace("Echo", "Shop")
    boxed = shop.replace("episode.final_text == episode.task.answer", "episode.task.answer in episode.final_text")
    (tmp_path / "shop_env.py").write_text(boxed)
    config = {"name": "x", "env": {"target": "shop_env.py:Shop"}, "model": {"path": "unused"}}
    config["sandbox"] = {"backend": "unsafe", "allow_unsafe": True}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "runs").mkdir()
    await run_with(make_config(tmp_path / "runs"), YesAndNo(tokenizer), tokenizer)
    (tmp_path / "runs" / "t").rename(tmp_path / "runs" / "example")
    with StatusFile(tmp_path / "runs" / "example", WaitGraph(), stall_timeout_s=60.0):
        pass
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_every_block_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with endpoint() as url:
        names = {"agentrl": agentrl, "URL": url}
        for block in BLOCKS:
            await asyncio.to_thread(exec, block, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1.0 ") and "row-0 1.0 0" in said
    assert "The run is done 4" in said and "[0.5, 0.5, 0.5, 0.5]" in said
    assert said[-3:] == ["starting the sandbox", "playing", "playing: 1 of 1"]


@pytest.mark.parametrize("name", ["train", "evaluate", "rollout"])
def test_the_signatures_are_those_of_the_functions(name: str) -> None:
    (said,) = re.findall(rf"^agentrl\.{name}\((.*?)\)\s*->", PAGE, flags=re.DOTALL | re.MULTILINE)
    names = [part.strip().partition("=")[0] for part in said.split(",")]
    parameters = inspect.signature(getattr(agentrl, name)).parameters.values()
    assert [one for one in names if one != "*"] == [parameter.name for parameter in parameters]
    defaults = {part.strip() for part in said.split(",") if "=" in part}
    assert defaults == {
        f"{one.name}={one.default!r}" for one in parameters if one.default is not inspect.Parameter.empty
    }


def test_a_file_that_was_changed_is_loaded_again(tmp_path: Path) -> None:
    from agentrl.env import load_env_class

    file = tmp_path / "shop_env.py"
    file.write_text(ENVIRONMENT)
    first = load_env_class(f"{file}:Echo")
    assert load_env_class(f"{file}:Echo") is first
    file.write_text(ENVIRONMENT.replace('"row-{n}"', '"line-{n}"'))
    again = load_env_class(f"{file}:Echo")
    assert next(iter(first.tasks("test"))).id == "row-0" and next(iter(again.tasks("test"))).id == "line-0"
