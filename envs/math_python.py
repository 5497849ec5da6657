"""Competition mathematics with any kind of answer, with an interpreter and, as its control arm, without."""

from __future__ import annotations

from agentrl.env import register
from envs.boxed_math import BoxedMath
from envs.python_tool import WithPython


@register("Math-v0")
class Math(BoxedMath):
    """No tool, one turn."""


@register("MathPython-v0")
class MathPython(WithPython, Math):
    """With a stateful Python interpreter."""
