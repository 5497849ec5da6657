"""A task that a small random model solves half of the time, and that needs the sandbox session to keep its state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice
from typing import Any

from agentrl.env import Action, Env, Episode, StepResult
from agentrl.types import Message, Task, user

NUM_TURNS = 2
NUM_TEST_TASKS = 4


class EvenTotal(Env):
    """Rewards an even number of characters over all turns; the sandbox keeps the sum. Rows never repeat."""

    max_turns = NUM_TURNS

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        numbers = islice(count(), NUM_TEST_TASKS if split == "test" else None)
        return (Task(id=f"{split}-{i}", prompt=f"Write. {i}", answer="even") for i in numbers)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self._turn = 0
        self._session = await self.sandbox.open_session(seed=seed)
        await self._session.exec("total = 0")
        return [user(task.prompt)], {}

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        result = await self._session.exec(f"total += {len(action.message.content)}\ntotal")
        return StepResult([user(f"{result.result}. More.")], 0.0, self._turn == NUM_TURNS, False, {})

    async def score(self, episode: Episode) -> dict[str, float]:
        result = await self._session.exec("total % 2 == 0")
        return {"correct": float(result.result == "True")}

    async def close(self) -> None:
        if (session := getattr(self, "_session", None)) is not None:
            await session.close()
