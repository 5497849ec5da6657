"""GSM8K: grade-school word problems, with an interpreter and, as a control arm, without.

The set's worked solutions note each calculation, as `<<48/2=24>>`; these calculations are the demonstrations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.env import register
from agentrl.types import Message, Task
from envs.boxed_math import BoxedMath
from envs.python_tool import WithPython, python_call

_SUM = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
_ARITHMETIC = re.compile(r"[\d\s.+\-*/()]+")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


@register("Gsm8k-v0")
class Gsm8k(BoxedMath):
    """Grade-school word problems without a tool, in one turn."""

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """The worked solution without its calculations. Always right."""
        solution = task.metadata.get("solution")
        if not isinstance(solution, str) or "####" not in solution:
            return super().demonstrations(task, skill=skill, seed=seed)
        return [Message(role="assistant", content=f"{prose(solution)}\nThe answer is \\boxed{{{task.answer}}}.")]


@register("Gsm8kPython-v0")
class Gsm8kPython(WithPython, Gsm8k):
    """Grade-school word problems with a stateful Python interpreter."""

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """One call that prints the results of the calculations, then the solution. Always right."""
        messages = super().demonstrations(task, skill=skill, seed=seed)
        sums = sums_of(str(task.metadata.get("solution", "")))
        if messages is None or not sums:
            return messages
        return [python_call("\n".join(f"print({each})" for each in sums)), *messages]


def prose(solution: str) -> str:
    """A worked solution without calculator notes and marked answer."""
    return _SUM.sub("", solution.rpartition("####")[0]).strip()


def sums_of(solution: str) -> list[str]:
    """The calculations of a worked solution, as Python. Those that are not arithmetic are left out."""
    sums = [_LEADING_ZEROS.sub("", match[1].strip()) for match in _SUM.finditer(solution)]
    return [each for each in sums if each and _ARITHMETIC.fullmatch(each)]
