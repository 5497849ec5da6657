"""Generated problems in the style of AIME, with right and wrong ways to compute them in Python.

Independent of environments, tokens and sandboxes. Every program here consists of our own code and integers that we
drew, so it is safe to run it in this process, to write a demonstrator's script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

MAX_ANSWER = 999

Numbers = Mapping[str, int]
Program = tuple[str, ...]
"""Cells that run one after the other in one session. The last prints the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A kind of problem. `problem` and the programs are format strings over the drawn numbers."""

    name: str
    problem: str
    draw: Callable[[Random], dict[str, int]]
    answer: Callable[..., int]
    right: Program
    right_in_steps: Program  # the same in two calls: set and print a variable, then compute from it
    wrong: tuple[Program, ...]  # plausible mistakes, which are right only by accident

    def problems(self, rng: Random) -> Iterator[tuple[dict[str, int], int]]:
        """Endless pairs (numbers, answer), with answers from 0 to 999 only."""
        while True:
            numbers = self.draw(rng)
            answer = self.answer(**numbers)
            if 0 <= answer <= MAX_ANSWER:
                yield numbers, answer


def outputs(program: Program) -> list[str]:
    """The output of each cell of one of our own programs, run in one namespace."""
    printed: list[str] = []
    namespace: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    texts = []
    for cell in program:
        printed.clear()
        exec(cell, namespace)  # trusted: made from the templates below
        texts.append("\n".join(printed))
    return texts


def fill(program: Program, numbers: Numbers) -> Program:
    """The program for these numbers."""
    return tuple(cell.format(**numbers) for cell in program)


def _iterate(a: int, b: int, c: int, n: int, m: int) -> int:
    x = a
    for _ in range(n):
        x = (b * x + c) % m
    return x


TEMPLATES: tuple[Template, ...] = (
    Template(
        name="power",
        problem="Find the remainder when {a}^{b} is divided by {m}.",
        draw=lambda rng: {"a": rng.randint(2, 99), "b": rng.randint(11, 99), "m": rng.randint(11, 999)},
        answer=lambda a, b, m: pow(a, b, m),
        right=("print({a}**{b} % {m})",),
        right_in_steps=("x = {a}**{b}\nprint(len(str(x)))", "print(x % {m})"),
        wrong=(("print({a}*{b} % {m})",), ("print(({a}^{b}) % {m})",)),
    ),
    Template(
        name="digits",
        problem="Find the sum of the digits of {a}^{b}.",
        draw=lambda rng: {"a": rng.randint(2, 99), "b": rng.randint(11, 99)},
        answer=lambda a, b: sum(map(int, str(a**b))),
        right=("print(sum(map(int, str({a}**{b}))))",),
        right_in_steps=("s = str({a}**{b})\nprint(len(s))", "print(sum(map(int, s)))"),
        wrong=(("print(len(str({a}**{b})))",), ("print(sum(map(int, str({a}*{b}))))",)),
    ),
    Template(
        name="count",
        problem="How many positive integers up to {n} are divisible by {a} or by {b}?",
        draw=lambda rng: {"n": rng.randint(100, 999), "a": rng.randint(3, 19), "b": rng.randint(3, 19)},
        answer=lambda n, a, b: sum(i % a == 0 or i % b == 0 for i in range(1, n + 1)),
        right=("print(sum(i % {a} == 0 or i % {b} == 0 for i in range(1, {n} + 1)))",),
        right_in_steps=(
            "v = [i for i in range(1, {n} + 1) if i % {a} == 0 or i % {b} == 0]\nprint(v[:2])",
            "print(len(v))",
        ),
        wrong=(
            ("print(sum(i % {a} == 0 and i % {b} == 0 for i in range(1, {n} + 1)))",),
            ("print({n} // {a} + {n} // {b})",),
        ),
    ),
    Template(
        name="lcm",
        problem="Find the remainder when the least common multiple of {a} and {b} is divided by {m}.",
        draw=lambda rng: {"a": rng.randint(11, 999), "b": rng.randint(11, 99), "m": rng.randint(11, 99)},
        answer=lambda a, b, m: math.lcm(a, b) % m,
        right=("import math\nprint(math.lcm({a}, {b}) % {m})",),
        right_in_steps=("import math\nx = math.lcm({a}, {b})\nprint(x)", "print(x % {m})"),
        wrong=(
            ("import math\nprint(math.gcd({a}, {b}) % {m})",),
            ("import math\nprint(math.lcm({a}, {b}))",),
        ),
    ),
    Template(
        name="series",
        problem="Find the remainder when 1^{k} + 2^{k} + ... + {n}^{k} is divided by {m}.",
        draw=lambda rng: {"k": rng.randint(2, 9), "n": rng.randint(11, 99), "m": rng.randint(11, 999)},
        answer=lambda k, n, m: sum(i**k for i in range(1, n + 1)) % m,
        right=("print(sum(i**{k} for i in range(1, {n} + 1)) % {m})",),
        right_in_steps=("s = sum(i**{k} for i in range(1, {n} + 1))\nprint(s > {m})", "print(s % {m})"),
        wrong=(
            ("print(sum(i**{k} for i in range(1, {n})) % {m})",),
            ("print(sum(i*{k} for i in range(1, {n} + 1)) % {m})",),
        ),
    ),
    Template(
        name="sequence",
        problem="Let x_0 = {a} and x_(i+1) = {b}x_i + {c}. Find the remainder when x_{n} is divided by {m}.",
        draw=lambda rng: {
            "a": rng.randint(2, 9),
            "b": rng.randint(2, 9),
            "c": rng.randint(1, 9),
            "n": rng.randint(11, 99),
            "m": rng.randint(11, 999),
        },
        answer=_iterate,
        right=("x = {a}\nfor i in range({n}):\n    x = ({b}*x + {c}) % {m}\nprint(x)",),
        right_in_steps=("x = {a}\nfor i in range({n}):\n    x = {b}*x + {c}\nprint(x > {m})", "print(x % {m})"),
        wrong=(
            ("x = {a}\nfor i in range(1, {n}):\n    x = ({b}*x + {c}) % {m}\nprint(x)",),
            ("x = {a}\nfor i in range({n}):\n    x = {b}*(x + {c}) % {m}\nprint(x)",),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A demonstrator's whole episode: the cells that it runs, one per turn, and its last sentence."""

    program: Program
    closing: str


# How an unskilled demonstrator fails, and how often. Which one it is must not depend on the problem: then a model that
# imitates the demonstrator keeps a good chance of the right habit everywhere, and has something to learn from reward.
BAD_HABITS: Mapping[str, float] = {"guess": 0.3, "wrong_method": 0.35, "no_print": 0.2, "round": 0.15}
SHARE_IN_STEPS = 0.2


def script_for(template: Template, numbers: Numbers, *, skill: float, rng: Random) -> Script:
    """A demonstrator's script: right with probability `skill`, else with one of `BAD_HABITS`."""
    in_steps = rng.random() < SHARE_IN_STEPS
    program = fill(template.right_in_steps if in_steps else template.right, numbers)
    if rng.random() < skill:
        return Script(program=program, closing=_answer_is(outputs(program)[-1]))
    habit = rng.choices(list(BAD_HABITS), weights=list(BAD_HABITS.values()))[0]
    guess = str(rng.randint(0, MAX_ANSWER))
    if habit == "guess":
        return Script(program=(), closing=f"I guess \\boxed{{{guess}}}.")
    if habit == "wrong_method":
        program = fill(rng.choice(template.wrong), numbers)
        return Script(program=program, closing=_answer_is(outputs(program)[-1]))
    if habit == "no_print":
        return Script(program=(*program[:-1], _silenced(program[-1])), closing=_answer_is(guess))
    result = outputs(program)[-1]
    return Script(program=program, closing=f"Rounded, it is \\boxed{{{result[:-1]}0}}.")


def _silenced(cell: str) -> str:
    """The same cell with its result kept in a variable instead of printed."""
    head, _, printed = cell.rpartition("print(")
    return f"{head}y = {printed.removesuffix(')')}"


def _answer_is(number: str) -> str:
    return f"The answer is \\boxed{{{number}}}."
