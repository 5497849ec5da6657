"""The tools of an MCP server as an environment's tools. Independent of transports and tokens.

Schemas are the server's own, word for word, and arguments are checked against them before a call. The model reads what
the server marks as an error. A server that fails or is gone raises EnvError.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from agentrl.env import ToolEnv, load_env_class
from agentrl.errors import ConfigError, EnvError
from agentrl.tools import ToolError, ToolSpec
from agentrl.types import Message, Task
from envs.adapters.mcp_connection import McpConnection, McpServer
from envs.adapters.questions import Questions
from envs.adapters.schema_tool import SchemaTool, asked, check_schema

if TYPE_CHECKING:
    import mcp_types

log = logging.getLogger(__name__)


def from_mcp(
    place: str,
    *,
    base: type[ToolEnv] | str = Questions,
    lifetime: Literal["worker", "episode"] = "episode",
    tools: Sequence[str] | None = None,
    prefix: str = "",
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_timeout_s: float = 30.0,
    call_timeout_s: float = 60.0,
) -> type[ToolEnv]:
    """Makes a class of `base` with the tools of an MCP server added.

    The server is asked for its tools once, here. If it offers others later, the episode fails.

    Args:
        place: a command line (stdio), or the URL of a server that runs (streamable HTTP).
        base: a ToolEnv class or target, which has the tasks and the score; it may be an `mcp:` target too.
        lifetime: `episode`: a session, and with a command a process, per episode; `worker`: one for all episodes.
        tools: the names to offer; None offers all.
        prefix: put before the names, if two servers use the same names.
        env, headers, start_timeout_s, call_timeout_s: see McpServer.

    Raises ConfigError: `base` is not a ToolEnv, names clash, a schema is invalid, or the server cannot be reached.

    Example:
        Files = from_mcp("npx -y @modelcontextprotocol/server-filesystem /srv/papers", base="research.py:Research")
    """
    base_class = load_env_class(base) if isinstance(base, str) else base
    if not issubclass(base_class, ToolEnv):
        raise ConfigError(f"mcp:{place}: base {base_class.__name__} is not a ToolEnv, so it cannot have tools")
    if lifetime not in ("worker", "episode"):
        raise ConfigError(f"mcp:{place}: lifetime={lifetime!r} must be 'worker' or 'episode'")
    server = McpServer(
        place=place,
        env=env or {},
        headers=headers or {},
        start_timeout_s=start_timeout_s,
        call_timeout_s=call_timeout_s,
    )
    layer = _Layer(server, lifetime=lifetime, listed=asked(lambda: _ask_for_tools(server)))
    return _with_tools(base_class, layer, layer.specs(tools, prefix, taken=base_class.tools))


class _Layer:
    """One server of an environment class: its tools as they were listed, and the connections to it."""

    def __init__(self, server: McpServer, *, lifetime: str, listed: Sequence[mcp_types.Tool]) -> None:
        self._server = server
        self._listed = {tool.name: _definition(tool) for tool in listed}
        self._tools = listed
        self.is_shared = lifetime == "worker"
        self._of_episodes: dict[int, McpConnection] = {}
        self._own: set[int] = set()  # episodes that have a connection of their own
        self._of_workers: dict[asyncio.AbstractEventLoop, _Shared] = {}

    def specs(self, names: Sequence[str] | None, prefix: str, taken: Mapping[str, ToolSpec]) -> dict[str, ToolSpec]:
        """The tools to offer, by the name that the model uses. Raises ConfigError."""
        where = f"mcp:{self._server.place}"
        if unknown := set(names or ()) - set(self._listed):
            raise ConfigError(f"{where} has no tool {sorted(unknown)}; it has {sorted(self._listed)}")
        found: dict[str, ToolSpec] = {}
        for tool in self._tools:
            if names is not None and tool.name not in names:
                continue
            name = prefix + tool.name
            if name in taken or name in found:
                raise ConfigError(f"{where}: the environment has a tool {name!r} already; set `prefix`")
            check_schema(tool.input_schema, where=f"{where}: tool {tool.name!r}")
            run = partial(self._call, tool.name)
            found[name] = SchemaTool(
                name=name, description=tool.description or "", parameters=tool.input_schema, run=run
            )
        return found

    async def _call(self, name: str, owner: object, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises ToolError for what the server marks as an error, EnvError when it fails."""
        from mcp import MCPError

        try:
            result = await self._of_episodes[id(owner)].call(name, arguments)
        except MCPError as error:
            raise ToolError(error.message) from error
        text = as_text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed and did not say why")
        return text

    async def begin(self, owner: object) -> None:
        """Assign a connection to an episode. Raises EnvError."""
        shared = self._of_workers.get(asyncio.get_running_loop()) if self.is_shared else None
        if shared is not None:
            self._of_episodes[id(owner)] = await shared.connection()
            return
        self._of_episodes[id(owner)] = await self.connect()
        self._own.add(id(owner))

    async def end(self, owner: object) -> None:
        """Close the episode's connection, if it has its own."""
        connection = self._of_episodes.pop(id(owner), None)
        if connection is not None and id(owner) in self._own:
            self._own.discard(id(owner))
            await connection.close()

    async def connect(self) -> McpConnection:
        """Open a connection, and check that the tools are those that were listed. Raises EnvError."""
        connection = await McpConnection.open(self._server)
        try:
            now = {tool.name: _definition(tool) for tool in await connection.tools()}
            if changed := sorted(n for n in now.keys() | self._listed.keys() if now.get(n) != self._listed.get(n)):
                raise EnvError(f"the MCP server {self._server.place} changed its tools {changed} since the start")
        except BaseException:
            await connection.close()
            raise
        return connection

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """One connection for all episodes of this loop, for the duration of the block."""
        loop = asyncio.get_running_loop()
        around, shared = self._of_workers.get(loop), _Shared(self.connect)
        self._of_workers[loop] = shared
        try:
            await shared.connection()
            yield
        finally:
            if around is None:
                self._of_workers.pop(loop, None)
            else:
                self._of_workers[loop] = around
            if shared.current is not None:
                await shared.current.close()


class _Shared:
    """A worker's connection. If it is lost, the next episode opens a new one."""

    def __init__(self, connect: Callable[[], Awaitable[McpConnection]]) -> None:
        self._connect = connect
        self._gate = asyncio.Lock()
        self.current: McpConnection | None = None

    async def connection(self) -> McpConnection:
        async with self._gate:
            if self.current is not None and not self.current.is_open:
                log.warning("an MCP server was lost; restarting it")
                await self.current.close()
                self.current = None
            if self.current is None:
                self.current = await self._connect()
            return self.current


def _with_tools(base: type[ToolEnv], layer: _Layer, specs: Mapping[str, ToolSpec]) -> type[ToolEnv]:
    class WithMcp(base):  # type: ignore[valid-type,misc]
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.tools = {**specs, **cls.tools}

        @classmethod
        @asynccontextmanager
        async def open_shared(cls) -> AsyncIterator[Any]:
            async with super().open_shared() as shared:
                if layer.is_shared:
                    async with layer.worker():
                        yield shared
                else:
                    yield shared

        async def reset(self, *, task: Task, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
            await layer.begin(self)
            return await super().reset(task=task, seed=seed)  # type: ignore[no-any-return]

        async def close(self) -> None:
            try:
                await super().close()
            finally:
                await layer.end(self)

    WithMcp.__name__ = WithMcp.__qualname__ = f"{base.__name__}WithMcp"
    WithMcp.__doc__ = base.__doc__
    WithMcp.tools = {**base.tools, **specs}
    return WithMcp


def as_text(result: mcp_types.CallToolResult) -> str:
    """The text of a result for the model: texts as they are, everything else by its name."""
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _block(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, {_num_bytes(block.data)} bytes]"
        case "resource_link":
            return f"[resource: {block.name}, {block.uri}]"
        case "resource":
            held = block.resource
            if (text := getattr(held, "text", None)) is not None:
                return f"[resource: {held.uri}]\n{text}"
            return f"[resource: {held.uri}, {held.mime_type or 'of unknown type'}, {_num_bytes(held.blob)} bytes]"
        case other:
            return f"[{other}]"


def _num_bytes(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _definition(tool: mcp_types.Tool) -> tuple[str | None, str]:
    """The description and schema of a tool, to compare."""
    return tool.description, json.dumps(tool.input_schema, sort_keys=True)


async def _ask_for_tools(server: McpServer) -> list[mcp_types.Tool]:
    connection = await McpConnection.open(server)
    try:
        return await connection.tools()
    finally:
        await connection.close()
