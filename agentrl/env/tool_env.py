"""`ToolEnv`: an environment whose tools are its own methods. Independent of how a model writes calls."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, ClassVar

from agentrl.env import places
from agentrl.env.attribution import attributed
from agentrl.env.base import Action, Env, StepResult
from agentrl.errors import ConfigError, ToolBroken
from agentrl.tools import ToolError, ToolSpec, collect_tools
from agentrl.types import Message, Task, ToolCall


class ToolEnv(Env):
    """An environment whose `@tool` methods the model may call; a turn without a call ends the episode.

    A call that is not valid (unknown tool, bad JSON, bad arguments), or whose tool raises ToolError, is answered by a
    short `tool` message and counted in `info["tool_errors"]`.

        class Shop(ToolEnv):
            async def reset(self, *, task, seed=None):
                return [user(task.prompt)], {}

            @tool
            async def price(self, item: str) -> float:
                "Price of an item in euros."
                return PRICES[item]
    """

    max_parallel_calls: ClassVar[int] = 4
    tool_timeout_s: ClassVar[float] = 240.0
    """Deadline of one call; after it the episode has failed (EnvError). Below rollout.episode_timeout_s, so that a part
    that hangs counts as a failure of that part and not as a low score."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tools = collect_tools(cls, private=_private_types())

    async def step(self, action: Action) -> StepResult:
        """Run the calls of one turn, in order."""
        calls = action.message.tool_calls
        observation: list[Message] = []
        num_errors = 0
        started = time.monotonic()
        for index, call in enumerate(calls):
            text, is_error = await self._answer(call, index)
            num_errors += is_error
            # A tool may pass on lone surrogates from hostile output; no tokenizer accepts them.
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
        """The text for the model, and whether the call failed."""
        if index >= self.max_parallel_calls:
            return f"Error: at most {self.max_parallel_calls} tool calls a turn; this one was not run", True
        spec = self.tools.get(call.name)
        if spec is None:
            return f"Error: there is no tool {call.name!r}; tools: {', '.join(self.tools) or 'none'}", True
        try:
            return await self._run(spec, call.arguments), False
        except ToolError as error:
            return f"Error: {error}", True

    async def _run(self, spec: ToolSpec, arguments: dict[str, Any]) -> str:
        deadline = asyncio.timeout(self.tool_timeout_s)
        method = getattr(self, spec.name, None)
        try:
            with attributed(f"tool {spec.name}", passing=(ToolError, TimeoutError), at=method, error_type=ToolBroken):
                async with deadline:
                    return await spec.call(self, arguments, private=self.private)
        except TimeoutError as error:
            late = f"took more than {self.tool_timeout_s:g} s" if deadline.expired() else f"TimeoutError: {error}"
            place = places.raised_at(error) or places.defined_at(method)
            raise ToolBroken(f"tool {spec.name}: {late}{places.in_brackets(place)}") from error

    async def private(self, kind: type) -> Any:
        """The episode's object for a private argument: its task, or an interpreter that is opened on first use.

        Raises ConfigError without a task: the episode was not begun by the driver.
        """
        scope = self.scope
        if kind is Task:
            if scope.task is None:
                raise ConfigError(
                    f"{type(self).__name__} has no task yet: begin with agentrl.env.start(env, task, seed)"
                )
            return scope.task
        if scope.session is None:
            scope.session = await self.sandbox.open_session(seed=scope.seed)
        return scope.session


def _private_types() -> tuple[type, ...]:
    """Types of private arguments. The session's is known only where something has imported it."""
    client = sys.modules.get("sandbox.client")
    return (Task,) if client is None else (Task, client.SandboxSession)
