"""Every shipped mathematics environment passes its own check in full, and each has an arm without tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentrl.check import check_env
from agentrl.env import Env, load_env_class, make, play_script
from agentrl.env.canary import Canaries
from agentrl.testing import call
from agentrl.types import StopReason, Task
from sandbox.client import SandboxClient

one_loop = pytest.mark.asyncio(loop_scope="module")

PAIRS = [
    ("AimePython-v0", "Aime-v0"),
    ("MathPython-v0", "Math-v0"),
    ("Gsm8kPython-v0", "Gsm8k-v0"),
    ("Countdown-v0", "CountdownNoTool-v0"),
]
AIME = [{"problem": "Find 5^2.", "answer": "025", "solution": "It is $\\boxed{025}$."}]
MATH = [{"problem": "Halve 1.", "solution": "Half of one is $\\boxed{\\frac{1}{2}}$."}]
GSM8K = [
    {
        "question": "Ann has 48 eggs and sells half, then 02 more. How many are left?",
        "answer": "She sells 48/2=<<48/2=24>>24.\nLeft are 48-24-2=<<48-24-02=22>>22, not 3k=<<3k=9>>9.\n#### 22",
    },
    {"question": "How much is 1000 + 5?", "answer": "It is 1005.\n#### 1,005"},
]
ROWS: dict[str, list[dict[str, Any]]] = {"Aime": AIME, "Math": MATH, "Gsm8k": GSM8K}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxClient]:
    async with SandboxClient.embedded(slots=2) as client:
        yield client


def rows_of(env_id: str, folder: Path) -> str | None:
    name = next((name for name in ROWS if env_id.startswith(name)), None)
    if name is None:
        return None
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[name])))
    return str(path)


@one_loop
@pytest.mark.parametrize("env_id", [env_id for pair in PAIRS for env_id in pair])
async def test_it_passes_its_check_demonstrations_included(env_id: str, sandbox: SandboxClient, tmp_path: Path) -> None:
    report = await check_env(
        load_env_class(env_id), data=rows_of(env_id, tmp_path), sandbox=sandbox, limit=12, timeout_s=60
    )
    assert report.ok, report
    details = {check.name: check.detail for check in report.checks}
    assert details["demonstrations"].startswith("score 1 on")
    assert details["answers"].startswith("the gold answer scores 1 and a wrong one 0 on")


@one_loop
@pytest.mark.parametrize("env_id", [env_id for pair in PAIRS for env_id in pair])
async def test_its_canaries_live(env_id: str, sandbox: SandboxClient) -> None:
    env_class = load_env_class(env_id)
    canaries = env_class.canaries()  # type: ignore[attr-defined]
    assert {canary.correct for canary in canaries} == {0.0, 1.0}
    assert any(canary.tool_texts for canary in canaries) is bool(env_class.tools)
    await Canaries(env_class, make_env=partial(make, env_class, sandbox=sandbox), sandbox=sandbox).check(when="now")


@pytest.mark.parametrize(("arm", "control"), PAIRS)
def test_the_control_arm_differs_in_the_tool_alone(arm: str, control: str) -> None:
    with_tool, without = load_env_class(arm), load_env_class(control)
    assert (list(with_tool.tools), list(without.tools)) == (["python"], [])
    assert issubclass(with_tool, without)
    assert with_tool.grade is without.grade  # type: ignore[attr-defined]
    assert without.max_turns == 1


async def test_a_control_arm_calls_nothing() -> None:
    env = make("Aime-v0")
    task = Task(id="t", prompt="?", answer="33")
    episode = await play_script(env, task, [call("python", code="print(33)")])
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TURNS, 0.0)
    assert "there is no tool 'python'" in episode.messages[-1].content


@one_loop
async def test_demonstrations_of_gsm8k_print_the_sums_of_the_solution(sandbox: SandboxClient, tmp_path: Path) -> None:
    env_class: type[Env] = load_env_class("Gsm8kPython-v0")
    task = next(iter(env_class.tasks("test", data=rows_of("Gsm8k", tmp_path))))
    episode = await play_script(make(env_class, sandbox=sandbox), task, env_class.demonstrations(task) or [])
    assert episode.messages[3].content == "24.0\n22"
    assert episode.final_text.endswith("The answer is \\boxed{22}.")
    assert "<<" not in episode.final_text
