"""The environment of README.md, copied into a file, is sound and rewards looking prices up and adding them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.check import check_env
from agentrl.env import Env, load_env_class, make, play_script
from agentrl.testing import call
from agentrl.types import Message

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")  # an id is registered once
def shop(tmp_path_factory: pytest.TempPathFactory) -> type[Env]:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    file = tmp_path_factory.mktemp("readme") / "shop.py"
    file.write_text(code)
    return load_env_class(f"{file}:Shop")


async def test_it_passes_its_check(shop: type[Env]) -> None:
    report = await check_env(shop, data=None, sandbox=None)
    assert [check for check in report.checks if not check.ok] == []


async def test_a_model_that_looks_prices_up_is_paid(shop: type[Env]) -> None:
    task = next(task for task in shop.tasks("test") if "chair" in task.prompt)
    script = [
        call("price", item="sofa"),
        call("price", item="chair"),
        Message(role="assistant", content=f"The total is \\boxed{{{task.answer}}}."),
    ]
    episode = await play_script(make(shop), task, script)
    assert [message.content for message in episode.messages if message.role == "tool"] == [
        "Error: there is no 'sofa'; we sell chair, desk, lamp, rug, shelf",
        "45",
    ]
    assert (episode.reward, episode.info["tool_errors"]) == (1.0, 1)


async def test_a_guess_is_not(shop: type[Env]) -> None:
    task = next(iter(shop.tasks("train")))
    episode = await play_script(make(shop), task, [Message(role="assistant", content="\\boxed{1}")])
    assert episode.reward == 0.0
