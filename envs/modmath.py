"""A small AIME: generated problems with AimePython's tool and grading, and a scripted demonstrator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from random import Random

from agentrl.env import Split, register
from agentrl.types import Message, Task, ToolCall
from envs.aime import AimePython
from envs.modmath_templates import TEMPLATES, script_for
from envs.splits import NUM_TEST_TASKS, split_of

_TEMPLATE_BY_NAME = {template.name: template for template in TEMPLATES}


@register("ModMath-v0")
class ModMath(AimePython):
    """The quickstart: modular powers, digit sums, counting, multiples, series, recurrences; answers from 0 to 999.

    Example:
        task = next(iter(ModMath.tasks("train", seed=0)))
        script = ModMath.demonstrations(task, skill=1.0)  # messages of an expert
    """

    system_prompt = "Solve the problem with Python. End with the answer in \\boxed{}."
    canary_answers = (("33", "033", "34"),)  # all answers are integers, so the grader of other answers is not started

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Endless for `train`; for `test` the same 512 with every seed. A text always belongs to the same split.

        The templates alternate, so that any prefix is balanced. With `data`, the rows of that file instead.
        """
        if data is not None:
            return super().tasks(split, data=data, seed=seed)
        if split == "test":
            return islice(_generate("test", "test"), NUM_TEST_TASKS)
        return _generate("train", f"train-{seed}")

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """Code in one call, or in two that share variables, then the boxed answer; None for rows from a file."""
        template = _TEMPLATE_BY_NAME.get(task.metadata.get("template", ""))
        if template is None:
            return None
        rng = Random(f"{seed}/{task.id}")
        script = script_for(template, task.metadata["numbers"], skill=skill, rng=rng)
        calls = [
            ToolCall(id=f"call_{turn}", name="python", arguments={"code": cell})
            for turn, cell in enumerate(script.program)
        ]
        turns = [Message(role="assistant", content="", tool_calls=(call,)) for call in calls]
        return [*turns, Message(role="assistant", content=script.closing)]


def _generate(split: Split, name: str) -> Iterator[Task]:
    """Generate problems: distinct ones for `test`; an endless stream may repeat a text."""
    rng = Random(name)
    streams = [template.problems(Random(rng.random())) for template in TEMPLATES]
    used: set[str] = set()
    index = 0
    while True:
        template = TEMPLATES[index % len(TEMPLATES)]
        numbers, answer = next(streams[index % len(TEMPLATES)])
        prompt = template.problem.format(**numbers)
        if split_of(prompt) != split or prompt in used:
            continue
        if split == "test":
            used.add(prompt)
        yield Task(
            id=f"{name}-{index}-{template.name}",
            prompt=prompt,
            answer=str(answer),
            metadata={"template": template.name, "numbers": numbers},
        )
        index += 1
