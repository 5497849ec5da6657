"""An OpenEnv server's environment as an Env. Independent of the protocol and of tokens.

If the server's action is one text, it is the model's message. If the action has several fields, the model gets a tool
`act` with that schema. If the server offers MCP tools, the model gets these. A refused action is an observation; a
failure of the server is EnvError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from agentrl.data.rows import read_tasks
from agentrl.env import Action, Split, StepResult, ToolEnv
from agentrl.errors import EnvError
from agentrl.tools import ToolError, ToolSpec
from agentrl.types import Message, Task, user
from envs.adapters.openenv_client import ActionRefused, Answer, OpenEnvServer, OpenEnvSession
from envs.adapters.schema_tool import SchemaTool, asked, check_schema
from envs.adapters.seed_tasks import seed_tasks

_OURS = ("metadata",)
"""Fields of actions and observations that belong to the framework, not to the model."""
_MCP_TYPES = ("call_tool", "list_tools")
_INFRASTRUCTURE = ("timeout", "transport_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How the model acts: by the text field of the action, or by tools."""

    text_field: str | None
    tools: Mapping[str, ToolSpec]


class OpenEnv(ToolEnv):
    """One session with a server. `from_openenv` makes the classes to use. Rewards are those of the steps."""

    reward_weights: ClassVar[Mapping[str, float]] = {}
    server: ClassVar[OpenEnvServer]
    kind: ClassVar[_Kind]
    instructions: ClassVar[str]
    num_test_tasks: ClassVar[int]

    def __init__(self) -> None:
        self._session = OpenEnvSession(self.server)
        self._reward = 0.0
        self._is_done = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tools = {**cls.kind.tools, **cls.tools}

    @classmethod
    def tasks(cls, split: Split, *, data: str | None = None, seed: int = 0) -> Iterable[Task]:
        """Rows of `data`, whose other columns are passed to the server's reset. Without `data`, a task is a seed."""
        if data is not None:
            return read_tasks(data, split=split)
        return seed_tasks(split, prompt=cls.instructions, seed=seed, num_test_tasks=cls.num_test_tasks)

    async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Returns the task's prompt, if it has one, and the server's first observation."""
        data = {"seed": seed, **task.metadata} if "seed" not in task.metadata and seed is not None else task.metadata
        answer = await self._session.reset(data)
        if answer.done:
            raise EnvError(f"the OpenEnv server {self.server.url} reports that the episode ended at its reset")
        return [user("\n\n".join(filter(None, (task.prompt, as_text(answer.observation)))))], {}

    async def step(self, action: Action) -> StepResult:
        """Play the message, or its tool calls. Several calls of one turn are several steps."""
        if self.kind.text_field is None or action.message.tool_calls or action.parse_errors:
            result = await super().step(action)
            reward, self._reward = self._reward, 0.0
            return result._replace(reward=reward, terminated=self._is_done or result.terminated)
        try:
            answer = await self._session.step({self.kind.text_field: action.message.content})
        except ActionRefused as error:
            return StepResult([user(f"Error: {error}")], 0.0, False, False, {"bad_actions": 1})
        return StepResult([user(as_text(answer.observation))], answer.reward, answer.done, False, {"bad_actions": 0})

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def act(self, action: Mapping[str, Any]) -> Answer:
        """One step through a tool. Raises ToolError for an action that is refused or comes after the end."""
        if self._is_done:
            raise ToolError("the episode is over; this one was not played")
        try:
            answer = await self._session.step(action)
        except ActionRefused as error:
            raise ToolError(str(error)) from error
        self._reward += answer.reward
        self._is_done = answer.done
        return answer


def from_openenv(
    url: str,
    *,
    instructions: str = "",
    max_turns: int = 32,
    num_test_tasks: int = 64,
    connect_timeout_s: float = 60.0,
    step_timeout_s: float = 120.0,
) -> type[OpenEnv]:
    """Makes an Env class from the environment of an OpenEnv server.

    Args:
        url: URL of a running server; see OpenEnvServer.
        instructions: text before the first observation, for tasks that are seeds.
        max_turns: limit on the turns of an episode.
        num_test_tasks: number of seeds in the test split.
        connect_timeout_s, step_timeout_s: see OpenEnvServer.

    Raises ConfigError: nothing answers at `url`, or the server describes no action that a model can take.

    Example:
        Game = from_openenv("http://127.0.0.1:8000", instructions="Play well.", max_turns=20)
    """
    server = OpenEnvServer(url=url, connect_timeout_s=connect_timeout_s, step_timeout_s=step_timeout_s)
    kind = asked(lambda: _kind(server))
    fields = {
        "__doc__": f"What {url} serves.",
        "__module__": __name__,
        "server": server,
        "kind": kind,
        "instructions": instructions,
        "max_turns": max_turns,
        "num_test_tasks": num_test_tasks,
    }
    return type("OpenEnvAt" + "".join(c if c.isalnum() else "_" for c in url), (OpenEnv,), fields)


async def _kind(server: OpenEnvServer) -> _Kind:
    """How the model acts, from the server's description of its actions. Raises EnvError."""
    schema = await server.action_schema()
    properties = {name: part for name, part in schema.get("properties", {}).items() if name not in _OURS}
    if properties.get("type", {}).get("const") in _MCP_TYPES:
        return _Kind(text_field=None, tools=await _mcp_tools(server))
    if len(properties) == 1 and next(iter(properties.values())).get("type") == "string":
        return _Kind(text_field=next(iter(properties)), tools={})
    required = [name for name in schema.get("required", []) if name in properties]
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    parameters |= {"type": "object", "properties": properties, "required": required}
    check_schema(parameters, where=f"openenv:{server.url}: its action")
    description = schema.get("description") or "Act in the environment."
    return _Kind(text_field=None, tools={"act": _tool("act", description, parameters, _act)})


async def _mcp_tools(server: OpenEnvServer) -> dict[str, ToolSpec]:
    session = OpenEnvSession(server)
    try:
        await session.reset({})
        listed = (await session.step({"type": "list_tools"})).observation.get("tools")
    except ActionRefused as error:
        raise EnvError(f"the OpenEnv server {server.url} does not list its tools: {error}") from error
    finally:
        await session.close()
    if not listed:
        raise EnvError(f"the OpenEnv server {server.url} offers no tool")
    found = {}
    for tool in listed:
        schema = tool.get("input_schema") or {"type": "object", "properties": {}}
        check_schema(schema, where=f"openenv:{server.url}: tool {tool['name']!r}")
        run = partial(_call, tool["name"])
        found[tool["name"]] = _tool(tool["name"], tool.get("description") or tool["name"], schema, run)
    return found


def _tool(name: str, description: str, parameters: Mapping[str, Any], run: Any) -> ToolSpec:
    return SchemaTool(name=name, description=description, parameters=parameters, run=run)


async def _act(env: OpenEnv, arguments: dict[str, Any]) -> str:
    return as_text((await env.act(arguments)).observation)


async def _call(name: str, env: OpenEnv, arguments: dict[str, Any]) -> str:
    """Call an MCP tool of the server. Raises ToolError for what it marks as an error, EnvError when it fails."""
    observation = (await env.act({"type": "call_tool", "tool_name": name, "arguments": arguments})).observation
    if error := observation.get("error"):
        if error.get("error_type") in _INFRASTRUCTURE:
            raise EnvError(f"tool {name} of the OpenEnv server: {error.get('message')}")
        raise ToolError(str(error.get("message")))
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return as_text(observation) if result is None else _plain(result)
    text = "\n".join(
        str(part["text"]) if part.get("type") == "text" else f"[{part.get('type')}]" for part in result["content"]
    )
    if result.get("is_error") or result.get("isError"):
        raise ToolError(text)
    return text


def as_text(observation: Mapping[str, Any]) -> str:
    """An observation in words: a single text as it is, several fields as `name: value`."""
    shown = {name: value for name, value in observation.items() if name not in _OURS and value is not None}
    if len(shown) == 1:
        return _plain(next(iter(shown.values())))
    return "\n".join(f"{name}: {_plain(value)}" for name, value in shown.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
