"""AIME: problems whose answer is an integer from 0 to 999, with a stateful Python interpreter."""

from __future__ import annotations

from agentrl.env import register
from agentrl.errors import DataError
from envs.grading import aime_integer
from envs.math_python import MathPython


@register("AimePython-v0")
class AimePython(MathPython):
    """As MathPython, graded the way AIME is: exact integers, no symbolic equality."""

    async def grade(self, text: str, gold: str) -> bool:
        """Exact integers. Raises DataError when the gold answer itself is not one from 0 to 999."""
        wanted = aime_integer(f"\\boxed{{{gold}}}")
        if wanted is None:
            raise DataError(f"gold answer {gold!r} is not an integer from 0 to 999; use MathPython for such rows")
        return aime_integer(text) == wanted
