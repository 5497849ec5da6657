"""Every code block of docs/environments.md does what the page says."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.check import check_env
from agentrl.config import EnvConfig
from agentrl.env import Action, Episode, advance, close, group_scored, load_env_class, make, play_script, start
from agentrl.testing import call
from agentrl.types import Message, StopReason
from agentrl.wrappers import load_wrappers

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), flags=re.DOTALL)
FILES = {match[1]: code for _, code in BLOCKS if (match := re.match(r"# (\w+\.py)\n", code))}
SCRIPTS = [code for language, code in BLOCKS if language == "python" and code not in FILES.values()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Registered once in this process, by whichever test came first; another folder's file is another class.
    monkeypatch.setattr("agentrl.env.registry._SPECS", {})
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "capitals.py:Capitals",
        "bank.py:Bank",
        "higher.py:Higher",
        "parcels.py:Parcels",
        "search.py:Search",
        "briefly.py:Briefly",
    ],
)
async def test_each_environment_passes_its_check(folder: Path, target: str) -> None:
    report = await check_env(load_env_class(f"{folder}/{target}"), data=None, sandbox=None)
    assert [check for check in report.checks if not check.ok] == []


async def test_private_arguments_are_private_and_the_model_can_be_refused(folder: Path) -> None:
    bank = load_env_class(f"{folder}/bank.py:Bank")
    parameters = bank.tool_schemas()[0]["function"]["parameters"]
    assert list(parameters["properties"]) == ["amount", "currency"]
    assert parameters["properties"]["currency"]["description"] == "which purse to take it from"
    (task,) = bank.tasks("test")
    script = [call("withdraw", amount=n) for n in (10, 8, 2)]
    episode = await play_script(make(bank), task, [*script, Message(role="assistant", content="Done.")])
    said = [message.content for message in episode.messages if message.role == "tool"]
    assert said == ["Error: at most 8 at a time", '{"left":2}', '{"left":0}']
    assert (episode.reward, episode.info["tool_errors"]) == (1.0, 1)


async def test_turn_rewards_and_named_ones_are_weighted(folder: Path) -> None:
    higher = load_env_class(f"{folder}/higher.py:Higher")
    script = [Message(role="assistant", content=text) for text in ("5", "4", "please 101")]
    episode = await play_script(make(higher), next(iter(higher.tasks("test"))), script)
    assert episode.rewards == {"correct": 1.0, "polite": 1.0, "step": 2.0}
    assert episode.reward == pytest.approx(1.0 + 0.1 + 0.5 * 2.0)


async def test_among_right_answers_the_shorter_is_better(folder: Path) -> None:
    briefly = load_env_class(f"{folder}/briefly.py:Briefly")
    task = next(iter(briefly.tasks("test")))
    right, wrong = briefly.phrase("0"), briefly.phrase("1")
    said = [right, f"{right:>34}", f"{right:>44}", wrong]
    played = [await play_script(make(briefly), task, [Message(role="assistant", content=text)]) for text in said]
    scored = await group_scored(make(briefly), played)
    assert len(right) == 24
    assert [one.rewards["brief"] for one in scored] == [1.0, 0.5, 0.0, 0.0]
    assert [one.reward for one in scored] == pytest.approx([1.2, 1.1, 1.0, 0.0])
    alone = await group_scored(make(briefly), [played[0], played[3]])
    assert [one.reward for one in alone] == [1.0, 0.0]


async def test_turn_rewards_of_tools_are_given_in_their_turn(folder: Path) -> None:
    parcels = load_env_class(f"{folder}/parcels.py:Parcels")
    (task,) = parcels.tasks("test")
    sends = [call("send", parcel=parcel, town=town) for parcel, town in (("lamp", "Oslo"), ("book", "Oslo"))]
    env = make(parcels)
    await start(env, task, seed=0)
    rewards = [(await advance(env, Action(message=message))).reward for message in sends]
    await close(env)
    assert rewards == [1.0, 0.0]
    end = Message(role="assistant", content="Done.")
    partly = await play_script(make(parcels), task, [*sends, end])
    assert (partly.rewards, partly.reward) == ({"correct": 0.0, "step": 1.0}, pytest.approx(0.2))
    assert (partly.info["parcels_right"], partly.info["tool_calls"]) == (1, 2)
    rest = [call("send", parcel=parcel, town=town) for parcel, town in (("book", "Lima"), ("vase", "Nairobi"))]
    assert (await play_script(make(parcels), task, [sends[0], *rest, end])).reward == pytest.approx(1.6)


def test_the_table_of_an_episode_has_everything_that_an_episode_offers() -> None:
    table = (ROOT / "docs" / "environments.md").read_text().partition("### What `score` receives")[2]
    rows = re.findall(r"^\| `(\w+)` \|", table.partition("\n### ")[0], flags=re.MULTILINE)
    properties = [name for name, value in vars(Episode).items() if isinstance(value, property)]
    assert sorted(rows) == sorted([field.name for field in dataclasses.fields(Episode)] + properties)
    named = set(re.findall(r"`(?:StopReason\.)?([A-Z_]+)`", table.partition("\n### ")[0]))
    assert named == {reason.name for reason in StopReason}


async def test_the_wrapper_of_the_page_changes_what_is_said(folder: Path) -> None:
    capitals = load_env_class(f"{folder}/capitals.py:Capitals")
    settings = EnvConfig(target="x", wrappers=[{f"{folder}/shout.py:Shout": {"mark": "!!"}}])  # type: ignore[list-item]
    env = make(capitals, wrappers=load_wrappers(settings.wrappers))
    script = [call("look_up", country="Peru"), Message(role="assistant", content="Lima")]
    episode = await play_script(env, next(iter(capitals.tasks("test"))), script)
    assert episode.messages[2].content == "LIMA!!"


async def test_the_config_of_the_page_is_a_config(folder: Path) -> None:
    (text,) = [code for language, code in BLOCKS if language == "yaml"]
    settings = EnvConfig.model_validate(yaml.safe_load(text)["env"])
    env: Any = make(load_env_class(f"{folder}/{settings.target}"), wrappers=load_wrappers(settings.wrappers))
    task = next(iter(env.unwrapped.tasks("test")))
    episode = await play_script(env, task, [Message(role="assistant", content="Paris")])
    assert episode.reward == 2.0


def test_the_commands_and_scripts_of_the_page_run(folder: Path) -> None:
    (shell,) = [code for language, code in BLOCKS if language == "sh"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    typed = 'look_up(country="France")\nParis\n'
    for line in shell.splitlines():
        command = [sys.executable, "-m", *line.split()]
        done = subprocess.run(command, input=typed, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "reward 1 (correct 1)" in done.stdout
    assert len(SCRIPTS) == 1
    subprocess.run([sys.executable, "-c", SCRIPTS[0]], env=env, check=True, timeout=60)
