"""Math problems with a stateful Python interpreter: the `python` tool, boxed answers. Rows come from a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from agentrl.data import endless, read_tasks
from agentrl.env import Episode, Split, ToolEnv, register
from agentrl.errors import ConfigError, EnvError
from agentrl.tools import tool
from agentrl.types import Message, Task, system, user
from envs.grading import is_correct

if TYPE_CHECKING:
    from sandbox.client import SandboxSession


@register("MathPython-v0")
class MathPython(ToolEnv):
    """Competition mathematics; integer answers are compared as integers, others by math-verify."""

    max_turns = 8
    system_prompt: ClassVar[str] = (
        "Solve the problem. You may run Python with the tool `python`; variables persist between calls, and what you "
        "print is what you see. End with the final answer in \\boxed{}."
    )

    _seed: int | None = None
    _session: SandboxSession | None = None

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Rows of the JSONL file `data`: in order for `test`, reshuffled epochs without end for `train`."""
        if data is None:
            key = "train_data" if split == "train" else "eval_data"
            raise ConfigError(f"{cls.__name__} needs rows: set env.{key} (or --data) to a JSONL file")
        rows = read_tasks(data, need_answers=True)
        return endless(rows, seed=seed) if split == "train" else rows

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The instructions and the problem. The interpreter is opened by the first call: many episodes make none."""
        self._seed = seed
        return [system(self.system_prompt), user(task.prompt)], {}

    @tool
    async def python(self, code: Annotated[str, "Python source; print what you need to see"]) -> str:
        """Run Python code. Variables persist between calls."""
        if self._session is None:
            self._session = await self.sandbox.open_session(seed=self._seed)
        return (await self._session.exec(code)).to_text() or "(no output)"

    async def score(self, episode: Episode) -> dict[str, float]:
        """`correct`: 1.0 when the last boxed answer of the final message equals the gold answer."""
        if episode.task.answer is None:
            raise EnvError(f"task {episode.task.id} has no answer to grade against")
        return {"correct": float(await self.grade(episode.final_text, episode.task.answer))}

    async def grade(self, text: str, gold: str) -> bool:
        """Whether the final text answers the problem. Subclasses with other answers override this."""
        return await is_correct(text, gold)

    async def close(self) -> None:
        """Give the interpreter back."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
