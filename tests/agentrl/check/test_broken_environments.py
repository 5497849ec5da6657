"""What `agentrl env check` says of environments that are broken in one way each: one line, with file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.check import Check, check_env, check_target, rehearse
from agentrl.env import load_env_class, make, rows_of
from agentrl.errors import ConfigError, EnvError
from tests.agentrl.check.broken_environments import BLOCKING, CASES, SOUND, Broken, look, score, source

HANGING = ("hang", "sleeps")


def written(folder: Path, text: str) -> str:
    """The target of an environment in a file of its own."""
    path = folder / "broken.py"
    path.write_text(text)
    return f"{path}:Broken"


async def checks_of(target: str, *, timeout_s: float) -> list[Check]:
    """The checks that did not pass; a ConfigError as the check `loading`."""
    try:
        report = await check_env(load_env_class(target), data=None, sandbox=None, timeout_s=timeout_s)
    except ConfigError as error:
        return [Check(name="loading", detail=str(error), level="FAIL")]
    return [check for check in report.checks if check.level != "ok"]


@pytest.mark.parametrize("name", CASES)
async def test_a_broken_environment_gets_one_line(name: str, tmp_path: Path) -> None:
    broken: Broken = CASES[name]
    target = written(tmp_path, broken.text)
    found = await checks_of(target, timeout_s=1 if any(word in name for word in HANGING) else 60)
    said = broken.said.replace("FILE", re.escape(target.rpartition(":")[0]))
    matching = [check for check in found if check.name == broken.check and re.search(said, check.detail)]
    assert [check.level for check in matching] == ["warn" if broken.warns else "FAIL"], found
    places = [re.findall(r"broken\.py:\d+", check.detail) for check in found]
    assert len(found) == 1 or any(places[0][:1] != other[:1] for other in places[1:]), found


@pytest.mark.parametrize("name", SOUND)
async def test_what_has_one_meaning_is_accepted(name: str, tmp_path: Path) -> None:
    assert await checks_of(written(tmp_path, SOUND[name]), timeout_s=60) == []


@pytest.mark.parametrize("name", ["tool-sleeps"])
async def test_code_that_blocks_is_ended_and_named(name: str, tmp_path: Path) -> None:
    seen: list[str] = []
    target = written(tmp_path, BLOCKING[name])
    report = await check_target(target, timeout_s=2, on_check=lambda check: seen.append(check.name))
    assert seen == [check.name for check in report.checks]
    (failed,) = (check for check in report.checks if not check.ok)
    assert failed.name == "tool calls"
    assert re.search(r"broken\.py:15 blocks the process: .* 2 s.*`def` without `async`", failed.detail)


async def test_code_that_ignores_its_cancellation_is_ended_and_named(tmp_path: Path) -> None:
    wait = "    try:\n        await asyncio.sleep(1000)\n    except BaseException:\n        await asyncio.sleep(1000)"
    target = written(tmp_path, source(before="import asyncio", close=f"async def close(self):\n{wait}"))
    report = await check_target(target, timeout_s=2)
    assert report.checks[-1].name == "one turn"
    assert "Broken.close did not return after its deadline, and ignores its cancel" in report.checks[-1].detail


async def test_what_is_wrong_may_be_said_at_any_length(tmp_path: Path) -> None:
    task = "Task(id='x' * 300_000, prompt='q')"
    text = source(tasks=f"@classmethod\ndef tasks(cls, split, *, data=None, seed=0):\n    return [{task}] * 2")
    report = await check_target(written(tmp_path, text), timeout_s=60)
    assert [check.name for check in report.checks if not check.ok] == ["tasks"]


async def test_an_environment_that_ends_its_process_is_reported(tmp_path: Path) -> None:
    target = written(tmp_path, look('print("bye", flush=True); import os; os._exit(7)'))
    report = await check_target(target, timeout_s=60)
    assert report.checks[-1].detail == "the environment's code ended the process, with exit code 7"
    assert report.checks[-1].name == "tool calls"
    assert "bye" in report.printed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            score("return {'correct': 'yes'}"),
            r"the reward 'correct' is 'yes' \(str\): return a number \(.*broken.py:16\)",
        ),
        (source(reset="async def reset(self, *, task, seed=None):\n    pass"), "Broken.reset returned None: write"),
        (score("import asyncio; await asyncio.sleep(20)"), r"waits at .*broken.py:17.* rollout.episode_timeout_s"),
    ],
)
async def test_a_run_plays_a_scripted_episode_first(text: str, said: str, tmp_path: Path) -> None:
    env_class = load_env_class(written(tmp_path, text))
    with pytest.raises(EnvError, match=said):
        await rehearse(env_class, lambda: make(env_class), next(rows_of(env_class, "test")), limit_s=1)


async def test_a_tool_that_fails_with_made_up_arguments_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env_class = load_env_class(written(tmp_path, look('return {"a": "b"}[word]')))
    await rehearse(env_class, lambda: make(env_class), next(rows_of(env_class, "test")), limit_s=60)
    assert re.search(r"tool look: KeyError: .*broken.py:15\).*raise ToolError", caplog.text)
