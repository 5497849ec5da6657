"""AIME: problems whose answer is an integer from 0 to 999, with a stateful Python interpreter."""

from __future__ import annotations

from agentrl.env import register
from envs.grading import aime_integer
from envs.math_python import MathPython


@register("AimePython-v0")
class AimePython(MathPython):
    """Graded the way AIME is where the gold answer is an AIME answer: up to three digits, exact, nothing symbolic.

    Rows with other answers (MATH has them) are graded as MathPython grades them.
    """

    async def grade(self, text: str, gold: str) -> bool:
        """Exact integers from 0 to 999; `025` equals `25`."""
        wanted = aime_integer(f"\\boxed{{{gold}}}")
        return await super().grade(text, gold) if wanted is None else aime_integer(text) == wanted
