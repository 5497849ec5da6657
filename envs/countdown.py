"""Countdown: make the target from all the numbers with + - * /, with an interpreter and, as a control arm, without.

Problems are generated. An answer is an expression, which is parsed and evaluated exactly; it is never executed.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count, islice
from random import Random

from agentrl.env import Split, register
from agentrl.env.canary import Canary
from agentrl.errors import ConfigError
from agentrl.types import Message, Task
from envs.boxed_math import BoxedMath
from envs.countdown_search import search
from envs.grading import final_answer
from envs.python_tool import WithPython, python_call
from envs.splits import NUM_TEST_TASKS, split_of

HOW_MANY = (3, 4)
LARGEST = 99
TARGETS = range(10, 1000)
MAX_CHARACTERS = 200
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = {
    "\\times": "*",
    "\\cdot": "*",
    "×": "*",
    "·": "*",
    "\\div": "/",
    "÷": "/",
    "−": "-",
    "\\left": "",
    "\\right": "",
}
_SPACES = re.compile(r"\\[,;!: ]|\s")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_ARITHMETIC = re.compile(r"[0-9+\-*/()]+")


@register("CountdownNoTool-v0")
class CountdownNoTool(BoxedMath):
    """Countdown without a tool, in one turn: make the target from the numbers."""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`; for `test` the same 512 with every seed. Numbers and target belong to one split."""
        if data is not None:
            raise ConfigError(f"{cls.__name__} generates its problems: leave out env.train_data and env.eval_data")
        if split == "test":
            return islice(_generate("test", "test"), NUM_TEST_TASKS)
        return _generate("train", f"train-{seed}")

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """The answer, always right."""
        return [_closing(task, str(task.answer))]

    @classmethod
    def canaries(cls) -> Sequence[Canary]:
        """A right expression, and one that uses a number twice."""
        metadata = {"numbers": [3, 5, 7], "target": 56}
        task = Task(id="canary", prompt="Say what you know.", answer="(3 + 5) * 7", metadata=metadata)
        says = [Message(role="assistant", content=f"\\boxed{{{text}}}") for text in ("7*(5+3)", "7*(5+3+5-5)")]
        return [
            Canary(task=task, script=(said,), correct=reward) for said, reward in zip(says, (1.0, 0.0), strict=True)
        ]

    async def grade(self, text: str, task: Task) -> bool:
        """Whether the boxed expression uses each number once and equals the target."""
        answer = final_answer(text)
        return answer is not None and reaches(answer, task.metadata["numbers"], task.metadata["target"])


@register("Countdown-v0")
class Countdown(WithPython, CountdownNoTool):
    """Countdown with a stateful Python interpreter: make the target from the numbers.

    Example:
        env = agentrl.make("Countdown-v0", sandbox=client)
        task = next(iter(Countdown.tasks("train", seed=1)))
    """

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """A program that tries everything, and its result. Always right."""
        numbers, target = task.metadata["numbers"], task.metadata["target"]
        items = [(float(n), str(n)) for n in numbers]
        found = search(items, target)
        code = f"{inspect.getsource(search)}\nprint(search({items}, {target}))"
        return None if found is None else [python_call(code), _closing(task, found)]


def reaches(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Whether `answer`, in LaTeX or plain, equals `target` and uses each of `numbers` exactly once.

    `= target` at its end is allowed. Anything except whole numbers, + - * / and parentheses makes it wrong.

    >>> reaches("7 * (5 + 3)", [3, 5, 7], 56), reaches("7 * 8", [3, 5, 7], 56)
    (True, False)
    """
    expression, equals, right = _plain(answer).partition("=")
    if equals and right != str(target):
        return False
    if len(expression) > MAX_CHARACTERS or not _ARITHMETIC.fullmatch(expression):
        return False
    try:
        value, used = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, _NotArithmetic):
        return False
    return value == target and Counter(used) == Counter(numbers)


class _NotArithmetic(Exception):
    """The answer has something else than numbers, + - * / and parentheses."""


def _value(node: ast.expr) -> tuple[Fraction, list[int]]:
    """The exact value, and the numbers that it uses."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise _NotArithmetic
    left, used_left = _value(node.left)
    right, used_right = _value(node.right)
    return _OPERATORS[type(node.op)](left, right), used_left + used_right


def _plain(answer: str) -> str:
    """The answer with LaTeX's signs and fractions in Python's notation, without spaces."""
    if len(answer) > 4 * MAX_CHARACTERS:
        return ""
    for latex, sign in _SIGNS.items():
        answer = answer.replace(latex, sign)
    answer = _SPACES.sub("", answer).strip("$")
    while (simpler := _FRACTION.sub(r"((\1)/(\2))", answer)) != answer:
        answer = simpler
    return answer


def _closing(task: Task, expression: str) -> Message:
    target = task.metadata["target"]
    return Message(role="assistant", content=f"{expression} = {target}, so the answer is \\boxed{{{expression}}}.")


def _generate(split: Split, name: str) -> Iterator[Task]:
    rng, used = Random(name), set[str]()
    for index in count():
        numbers, target, expression, key = _draw(rng, split, used)
        if split == "test":
            used.add(key)
        prompt = (
            f"Make {target} out of the numbers {', '.join(map(str, numbers))}: use each of them exactly once, with "
            "+, -, *, / and parentheses. Give the expression as the answer, without an equals sign."
        )
        metadata = {"numbers": numbers, "target": target}
        yield Task(id=f"{name}-{index}", prompt=prompt, answer=expression, metadata=metadata)


def _draw(rng: Random, split: Split, used: set[str]) -> tuple[list[int], int, str, str]:
    """Numbers, a target, an expression for it, and the problem's key, which is the same for every order."""
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(rng.choice(HOW_MANY))]
        target, expression = _combined(rng, numbers)
        key = f"{sorted(numbers)} -> {target}"
        if target in TARGETS and split_of(key) == split and key not in used:
            return numbers, target, expression, key


def _combined(rng: Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Combine all numbers at random; every step is whole and positive."""
    items = [(number, str(number)) for number in numbers]
    while len(items) > 1:
        rng.shuffle(items)
        (b, y), (a, x) = sorted((items.pop(), items.pop()))
        choices = [(a + b, f"({x} + {y})"), (a * b, f"({x} * {y})")]
        if a > b:
            choices.append((a - b, f"({x} - {y})"))
        if a % b == 0:
            choices.append((a // b, f"({x} / {y})"))
        items.append(rng.choice(choices))
    return items[0]
