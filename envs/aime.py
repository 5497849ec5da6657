"""AIME: problems whose answer is an integer from 0 to 999, with an interpreter and, as a control arm, without."""

from __future__ import annotations

from agentrl.env import register
from agentrl.types import Task
from envs.boxed_math import BoxedMath
from envs.grading import aime_integer
from envs.python_tool import WithPython


@register("Aime-v0")
class Aime(BoxedMath):
    """AIME problems without a tool, in one turn: integers from 0 to 999, compared exactly.

    Rows with other answers (MATH has them) are graded as in `Math`.
    """

    async def grade(self, text: str, task: Task) -> bool:
        """Exact integers from 0 to 999; `025` equals `25`."""
        wanted = aime_integer(f"\\boxed{{{task.answer}}}")
        return await super().grade(text, task) if wanted is None else aime_integer(text) == wanted


@register("AimePython-v0")
class AimePython(WithPython, Aime):
    """AIME problems with a stateful Python interpreter.

    Example:
        env:
          target: AimePython-v0
          train_data: DAPO-17k
          eval_data: AIME-2024
    """
