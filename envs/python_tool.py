"""The `python` tool: a stateful interpreter in the sandbox, opened by its first call. Independent of grading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from agentrl.env.canary import Canary
from agentrl.tools import tool
from agentrl.types import Message, Task, ToolCall
from envs.boxed_math import BoxedMath

if TYPE_CHECKING:
    from sandbox.client import SandboxSession


class WithPython(BoxedMath):
    """Adds an interpreter to problems.

    Example:
        @register("PhysicsPython-v0")
        class PhysicsPython(WithPython, Physics): ...
    """

    max_turns = 8
    system_prompt = (
        "Solve the problem. You may run Python with the tool `python`; variables persist between calls, and what you "
        "print is what you see. End with the final answer in \\boxed{}."
    )

    _seed: int | None = None
    _session: SandboxSession | None = None

    @classmethod
    def canaries(cls) -> Sequence[Canary]:
        """The known answers, and one that uses the tool."""
        graded = super().canaries()
        script = (python_call("print(6 * 7)"), *graded[0].script)
        return [*graded, Canary(task=graded[0].task, script=script, correct=graded[0].correct, tool_texts=("42",))]

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Returns the instructions and the problem. The interpreter is opened by the first call, if any."""
        self._seed = seed
        return await super().reset(task=task, seed=seed)

    @tool
    async def python(self, code: Annotated[str, "Python source; print what you need to see"]) -> str:
        """Run Python code. Variables persist between calls."""
        if self._session is None:
            self._session = await self.sandbox.open_session(seed=self._seed)
        return (await self._session.exec(code)).to_text() or "(no output)"

    async def close(self) -> None:
        """Close the interpreter."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def python_call(code: str, number: int = 0) -> Message:
    """An assistant's turn that runs `code`."""
    call = ToolCall(id=f"call_{number}", name="python", arguments={"code": code})
    return Message(role="assistant", content="", tool_calls=(call,))
