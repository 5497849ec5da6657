"""Problems with a boxed answer: rows, first messages, grading. Has no tool; independent of the interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from agentrl.data.rows import endless
from agentrl.env import Episode, Split, ToolEnv
from agentrl.env.canary import Canary
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Message, Task, system, user
from envs.datasets import read_rows
from envs.grading import is_correct


class BoxedMath(ToolEnv):
    """Base class. Compares integer answers as integers, others by their text, then by math-verify.

    Example:
        @register("Physics-v0")
        class Physics(BoxedMath): ...
    """

    max_turns = 1
    system_prompt: ClassVar[str] = "Solve the problem. Reason step by step, and end with the final answer in \\boxed{}."
    canary_answers: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("33", "033", "34"),
        ("\\frac{1}{2}", "0.5", "0.25"),
    )
    """(gold, a right answer, a wrong one): pairs that the grader must always distinguish."""

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Rows of `data` (docs/math.md): in order for `test`, reshuffled epochs without end for `train`."""
        if data is None:
            key = "train_data" if split == "train" else "eval_data"
            raise ConfigError(
                f"{cls.__name__} needs rows: set env.{key} (or --data): a set's name, a hub name, or a file"
            )
        rows = read_rows(data, split)
        return endless(rows, seed=seed) if split == "train" else rows

    @classmethod
    def demonstrations(cls, task: Task, *, skill: float = 1.0, seed: int = 0) -> Sequence[Message] | None:
        """The row's own worked solution, if it boxes the answer. Always right."""
        solution = task.metadata.get("solution")
        if not isinstance(solution, str) or "\\boxed{" not in solution:
            return None
        return [Message(role="assistant", content=solution)]

    @classmethod
    def canaries(cls) -> Sequence[Canary]:
        """Answers whose grade is known."""
        graded = [
            (gold, text, reward)
            for gold, *texts in cls.canary_answers
            for text, reward in zip(texts, (1.0, 0.0), strict=True)
        ]
        return [
            Canary(
                task=Task(id=f"canary-{number}", prompt="Say what you know.", answer=gold),
                script=(Message(role="assistant", content=f"\\boxed{{{text}}}"),),
                correct=reward,
            )
            for number, (gold, text, reward) in enumerate(graded)
        ]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Returns the instructions and the problem."""
        return [system(self.system_prompt), user(task.prompt)], {}

    async def score(self, episode: Episode) -> dict[str, float]:
        """`correct`: 1.0 when the last boxed answer of the final message equals the gold answer."""
        if episode.task.answer is None:
            raise EnvError(f"task {episode.task.id} has no answer to grade against")
        return {"correct": float(await self.grade(episode.final_text, episode.task))}

    async def grade(self, text: str, task: Task) -> bool:
        """Whether the final text answers the problem. Subclasses with other answers override this."""
        return await is_correct(text, task.answer or "")
