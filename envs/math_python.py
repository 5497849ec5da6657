"""Competition mathematics with any kind of answer, with an interpreter and, as a control arm, without."""

from __future__ import annotations

from agentrl.env import register
from envs.boxed_math import BoxedMath
from envs.python_tool import WithPython


@register("Math-v0")
class Math(BoxedMath):
    """Competition mathematics without a tool, in one turn; answers of any kind."""


@register("MathPython-v0")
class MathPython(WithPython, Math):
    """Competition mathematics with a stateful Python interpreter; answers of any kind."""
