"""AIME: problems whose answer is an integer from 0 to 999, with an interpreter and, as its control arm, without."""

from __future__ import annotations

from agentrl.env import register
from agentrl.types import Task
from envs.boxed_math import BoxedMath
from envs.grading import aime_integer
from envs.python_tool import WithPython


@register("Aime-v0")
class Aime(BoxedMath):
    """Graded the way AIME is where the gold answer is an AIME answer: up to three digits, exact, nothing symbolic.

    Rows with other answers (MATH has them) are graded as Math grades them. No tool, one turn.
    """

    async def grade(self, text: str, task: Task) -> bool:
        """Exact integers from 0 to 999; `025` equals `25`."""
        wanted = aime_integer(f"\\boxed{{{task.answer}}}")
        return await super().grade(text, task) if wanted is None else aime_integer(text) == wanted


@register("AimePython-v0")
class AimePython(WithPython, Aime):
    """With a stateful Python interpreter."""
