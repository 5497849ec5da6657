"""A task for black-box agents on which a random model can be trained, and the same task as a plain Env."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agentrl.env import Action, Env, Episode, StepResult
from agentrl.env.agent_env import AgentEnv, Endpoint, run_command
from agentrl.types import Message, Task, user

TASKS = [Task(id=f"t{i}", prompt=f"Write. {i}") for i in range(8)]


class Even(AgentEnv):
    """Asks twice, then once with another system prompt; the final text must have an even number of characters."""

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return TASKS

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def ask(history: list[Any]) -> Any:
                answer = await client.chat.completions.create(model="gpt-4o", messages=history, temperature=0.3)
                return answer.choices[0].message

            history: list[Any] = [{"role": "user", "content": task.prompt}]
            history += [await ask(history), {"role": "user", "content": "Once more."}]
            await ask(history)
            await ask([{"role": "system", "content": "You end."}, {"role": "user", "content": task.prompt}])

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(episode.final_text) % 2 == 0)}


class EvenProgram(Even):
    """The same task; the agent is a separate program."""

    async def run(self, *, task: Task, endpoint: Endpoint) -> None:
        program = Path(__file__).with_name("black_box_agent.py")
        self.said = await run_command([sys.executable, str(program), task.prompt], endpoint=endpoint)

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"correct": float(len(self.said) % 2 == 0)}


class EvenTurn(Env):
    """The same task in one turn, without an agent."""

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return TASKS

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        return StepResult([], float(len(action.message.content) % 2 == 0), True, False, {})
