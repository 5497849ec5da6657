"""A task that a random model solves half of the time: write an even number of characters. It uses the sandbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.env import Episode, ToolEnv
from agentrl.tools import tool
from agentrl.types import Message, Task, user


class EvenLength(ToolEnv):
    """Rewards an even number of characters, counted in the sandbox."""

    max_turns = 2

    @classmethod
    def tasks(cls, split: str, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        return [Task(id=f"{split}-{i}", prompt=f"Write. {i}", answer="even") for i in range(8)]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self._session = await self.sandbox.open_session(seed=seed)
        return [user(task.prompt)], {}

    @tool
    async def python(self, code: str) -> str:
        """Run Python."""
        return (await self._session.exec(code)).to_text()

    async def score(self, episode: Episode) -> dict[str, float]:
        result = await self._session.exec(f"{len(episode.final_text)} % 2 == 0")
        return {"correct": float(result.result == "True")}

    async def close(self) -> None:
        await self._session.close()
