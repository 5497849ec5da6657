import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.check import check_env
from agentrl.env import make, play_script
from agentrl.errors import ConfigError, EnvError, SandboxError
from agentrl.testing import call
from agentrl.types import Message, StopReason, Task
from envs.math_python import MathPython
from sandbox.client import SandboxClient

one_loop = pytest.mark.asyncio(loop_scope="module")

HALF = Task(id="half", prompt="What is 1/2?", answer=r"\frac{1}{2}")
GOLDS = [
    "118",
    "-7",
    "1,005",
    r"\text{Tuesday}",
    "4, 0, -4",
    r"62^\circ",
    r"\frac{3}{4}",
    r"\left(0,\frac{1}{2}\right)",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxClient]:
    async with SandboxClient.embedded(slots=2) as client:
        yield client


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


@one_loop
async def test_variables_persist_over_turns_and_the_last_message_is_graded(sandbox: SandboxClient) -> None:
    script = [call("python", code="x = 1"), call("python", code="print(x / 2)"), says(r"\boxed{0.5}")]
    episode = await play_script(make(MathPython, sandbox=sandbox), HALF, script)
    assert [m.content for m in episode.messages if m.role == "tool"] == ["(no output)", "0.5"]
    assert (episode.stop_reason, episode.reward) == (StopReason.COMPLETED, 1.0)
    assert (await sandbox.health()).sessions == 0


@one_loop
async def test_a_box_printed_by_the_program_is_no_answer(sandbox: SandboxClient) -> None:
    script = [call("python", code=r"print('\\boxed{\\frac{1}{2}}')"), says("see above")]
    assert (await play_script(make(MathPython, sandbox=sandbox), HALF, script)).reward == 0.0


@one_loop
async def test_code_that_fails_is_an_observation(sandbox: SandboxClient) -> None:
    episode = await play_script(make(MathPython, sandbox=sandbox), HALF, [call("python", code="1/0")])
    assert "ZeroDivisionError" in episode.messages[-1].content
    assert episode.info["tool_errors"] == 0


@one_loop
async def test_real_kinds_of_gold_answers_pass_the_check(sandbox: SandboxClient, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"id": str(i), "problem": "?", "answer": gold} for i, gold in enumerate(GOLDS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    report = await check_env(MathPython, data=str(path), sandbox=sandbox, timeout_s=60)
    assert report.ok, report
    assert report.checks[-1].detail == f"the gold answer scores 1 and a wrong one 0 on {len(GOLDS)} tasks"


@one_loop
async def test_a_sandbox_that_is_gone_is_no_reward() -> None:
    async with SandboxClient("http://127.0.0.1:9") as nowhere:
        with pytest.raises(SandboxError, match="tool python"):
            await play_script(make(MathPython, sandbox=nowhere), HALF, [call("python", code="1"), says(r"\boxed{0.5}")])


@one_loop
async def test_a_task_without_an_answer_is_not_graded(sandbox: SandboxClient) -> None:
    with pytest.raises(EnvError, match="no answer to grade against"):
        await play_script(make(MathPython, sandbox=sandbox), Task(id="x", prompt="?"), [says(r"\boxed{}")])


def test_training_rows_never_end_and_test_rows_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "problem": "?", "answer": "1"}\n{"id": "b", "problem": "?", "answer": "2"}\n')
    assert [task.id for task in MathPython.tasks("test", data=str(path))] == ["a", "b"]
    assert len(list(itertools.islice(MathPython.tasks("train", data=str(path)), 100))) == 100


@pytest.mark.parametrize(("split", "key"), [("train", "env.train_data"), ("test", "env.eval_data")])
def test_missing_rows_name_the_setting(split: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        MathPython.tasks(split)  # type: ignore[arg-type]
