"""`ToolEnv`: an environment whose tools are its own methods. Routes the calls of a turn; knows no call format."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from agentrl.base_env import Env
from agentrl.drive import attributed
from agentrl.episode import Action, StepResult
from agentrl.tools import ToolArgumentError, collect_tools
from agentrl.types import Message, ToolCall


class ToolEnv(Env):
    """An environment whose `@tool` methods the model may call; a turn without a call ends the episode.

    A call that cannot be understood (unknown tool, bad JSON, bad arguments) is answered by a short `tool` message and
    counted in `info["tool_errors"]`.
    """

    max_parallel_calls: ClassVar[int] = 4

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tools = collect_tools(cls)

    async def step(self, action: Action) -> StepResult:
        """Run the calls of one turn, in order."""
        calls = action.message.tool_calls
        observation: list[Message] = []
        num_errors = 0
        started = time.monotonic()
        for index, call in enumerate(calls):
            text, is_error = await self._answer(call, index)
            num_errors += is_error
            # A tool may hand on lone surrogates from hostile output; they are no text and no tokenizer takes them.
            text = text.encode(errors="replace").decode()
            observation.append(Message(role="tool", content=text, tool_call_id=call.id))
        for error in action.parse_errors:
            num_errors += 1
            observation.append(Message(role="tool", content=f"Error: {error}"))
        info = {
            "tool_calls": len(calls) + len(action.parse_errors),
            "tool_errors": num_errors,
            "tool_s": time.monotonic() - started,
        }
        return StepResult(observation, 0.0, not observation, False, info)

    async def _answer(self, call: ToolCall, index: int) -> tuple[str, bool]:
        """What the model sees, and whether the call was in error."""
        if index >= self.max_parallel_calls:
            return f"Error: at most {self.max_parallel_calls} tool calls a turn; this one was not run", True
        spec = self.tools.get(call.name)
        if spec is None:
            return f"Error: there is no tool {call.name!r}; tools: {', '.join(self.tools) or 'none'}", True
        try:
            with attributed(f"tool {call.name}", passing=ToolArgumentError):
                return await spec.call(self, call.arguments), False
        except ToolArgumentError as error:
            return f"Error: {error}", True
