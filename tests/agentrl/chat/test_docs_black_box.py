"""The agent that readers of docs/black-box-agents.md copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import RolloutConfig
from agentrl.env import load_env_class, make
from agentrl.env.agent_env import AgentEnv
from agentrl.testing import ScriptedEngine, call
from agentrl.tokens.tokenizer import TurnTokenizer
from agentrl.types import Message
from envs.modmath import ModMath
from sandbox.client import SandboxClient
from tests.agentrl.rollouts.playing import play_group

DOCS = Path(__file__).parents[3] / "docs" / "black-box-agents.md"


@pytest.fixture
def pasted(tmp_path: Path) -> Callable[[str], type[AgentEnv]]:
    def paste(name: str) -> type[AgentEnv]:
        blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
        (code,) = [block for block in blocks if f"class {name}(" in block]
        path = tmp_path / "my_agent.py"
        path.write_text(code)
        found = load_env_class(f"{path}:{name}")
        assert issubclass(found, AgentEnv)
        return found

    return paste


async def test_the_agent_of_the_docs_solves_a_task(
    pasted: Callable[[str], type[AgentEnv]], tokenizer: TurnTokenizer
) -> None:
    solver = pasted("Solver")
    task = next(iter(solver.tasks("test")))
    # The model must see the very tool that the warm start taught it.
    said: list[str | Message] = [
        Message(role="assistant", content="", tool_calls=call("python", codee="1").tool_calls),
        call("python", code=f"x = {task.answer}"),
        call("python", code="print(x)"),
        f"The answer is \\boxed{{{task.answer}}}.",
    ]
    engine = ScriptedEngine(tokenizer=tokenizer, script=said)
    limits = RolloutConfig(max_context=2048, max_turn_tokens=200)
    async with SandboxClient.embedded() as sandbox:
        group = await play_group(
            lambda: make(solver, sandbox=sandbox),
            task,
            group_id=0,
            size=2,
            engine=engine,
            tokenizer=tokenizer,
            config=limits,
        )
    assert group.rewards_G == [1.0, 1.0]
    first = group.trajectories[0]
    shown = [message.content for message in first.messages if message.role == "tool"]
    assert "KeyError" in shown[0]
    assert task.answer in shown[2]
    opening = tokenizer.first_prompt(first.messages[:2], ModMath.tool_schemas())
    assert list(first.turns[0].observation_ids) == opening


def test_the_program_of_the_docs_loads(pasted: Callable[[str], type[AgentEnv]]) -> None:
    assert pasted("Program").max_turns == 64
