"""Rows with a question and an answer, for environments whose tools come from elsewhere. Independent of the tools."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from agentrl.data.rows import read_tasks
from agentrl.env import Episode, Split, ToolEnv
from agentrl.errors import ConfigError
from agentrl.types import Message, Task, system, user


class Questions(ToolEnv):
    """Asks the row's problem. The reward is 1.0 if the last line of the final message is the row's answer, else 0.0.

    The comparison ignores case, extra space, a final full stop, and a leading `Answer:`.
    """

    max_turns = 16
    system_prompt: ClassVar[str] = "Use the tools to find out. End with a line that holds the answer and nothing else."

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """The rows of `data`. Raises ConfigError without `data`, DataError for a row without an answer."""
        if data is None:
            raise ConfigError(f"{cls.__name__} asks the questions of a file: set env.train_data and env.eval_data")
        return read_tasks(data, split=split, need_answers=True)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Returns the instruction and the problem."""
        return [system(self.system_prompt), user(task.prompt)], {}

    @classmethod
    def phrase(cls, answer: str) -> str:
        """Returns a last message that `score` reads."""
        return f"Answer: {answer}"

    async def score(self, episode: Episode) -> dict[str, float]:
        """Returns `correct`: 1.0 or 0.0."""
        lines = [line for line in episode.final_text.splitlines() if line.strip()]
        said = re.sub(r"^\s*(the )?answer( is)?\s*:?\s*", "", lines[-1], flags=re.IGNORECASE) if lines else ""
        gold = _normal(episode.task.answer or "")
        return {"correct": float(bool(gold) and gold in (_normal(said), _normal(lines[-1] if lines else "")))}


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .*`").casefold()
