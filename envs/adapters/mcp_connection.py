"""A live session with an MCP server, kept open by its own task. Independent of environments.

The process that was started for a session always ends with it, also when this process is killed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from agentrl.errors import ConfigError, EnvError, MissingDependencyError
from envs.adapters.line_process import dying_with_us

if TYPE_CHECKING:
    import mcp
    import mcp_types
    from mcp.client import Transport

MAX_STDERR_BYTES = 4096
MAX_TOOL_PAGES = 100
CLOSE_TIMEOUT_S = 15.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """Where a server is, or how to start it.

    Args:
        place: `http://` or `https://` URL of streamable HTTP, or a command line, which is started and uses stdio.
        env: variables of the command, in addition to PATH, HOME and similar; the value `env:NAME` takes this process's.
        headers: of the HTTP requests; `env:NAME` works here too, so that a config holds no secret.
    """

    place: str
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 30.0
    call_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.place.strip():
            raise ConfigError("mcp: needs a command or a URL, such as mcp:http://127.0.0.1:8000/mcp")
        if self.is_http and self.env:
            raise ConfigError(f"mcp:{self.place} is a URL: `env` is for a command, `headers` for a URL")
        if not self.is_http and self.headers:
            raise ConfigError(f"mcp:{self.place} is a command: `headers` is for a URL, `env` for a command")

    @property
    def is_http(self) -> bool:
        """Whether it is a running server at a URL."""
        return self.place.startswith(("http://", "https://"))

    @asynccontextmanager
    async def transport(self, errors: TextIO) -> AsyncIterator[Transport]:
        """The client's transport. A command's standard error goes to `errors`."""
        if self.is_http:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            # Answers of slow tools may stream for the whole duration of the call.
            timeout = httpx2.Timeout(self.start_timeout_s, read=self.call_timeout_s + 5)
            async with httpx2.AsyncClient(headers=_filled(self.headers), timeout=timeout) as client:
                yield streamable_http_client(self.place, http_client=client)
        else:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            command, *args = dying_with_us(shlex.split(self.place))
            yield stdio_client(StdioServerParameters(command=command, args=args, env=_filled(self.env)), errlog=errors)


class McpConnection:
    """One session. Calls may overlap, and may come from any task of the loop."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(), name=f"mcp {server.place}")
        self._parts: tuple[asyncio.Future[Any], ...] = (self._ready, self._keeper)
        self._errors: TextIO

    @classmethod
    async def open(cls, server: McpServer) -> McpConnection:
        """Start or reach the server. Raises EnvError, with the end of its standard error where it has one."""
        _require_mcp()
        connection = cls(server)
        try:
            async with asyncio.timeout(server.start_timeout_s):
                await asyncio.wait([*connection._parts], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            await connection.close()
            raise connection._lost(f"was not ready within {server.start_timeout_s:g} s") from error
        except BaseException:
            await connection.close()
            raise
        if not connection._ready.done():
            raise connection._lost("cannot be reached") from connection._failure()
        return connection

    @property
    def is_open(self) -> bool:
        """Whether the session is open, as far as is known."""
        return not self._keeper.done() and not self._closing.is_set()

    async def tools(self) -> list[mcp_types.Tool]:
        """All tools of the server. Raises EnvError."""
        found: list[mcp_types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_TOOL_PAGES):
            page = await self._ask("tools/list", partial(_list_tools, cursor=cursor))
            found += page.tools
            if (cursor := page.next_cursor) is None:
                return found
        raise EnvError(f"the MCP server {self._server.place} lists tools endlessly")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        """The server's answer. Raises mcp.MCPError if it refuses the arguments, EnvError for other failures."""
        return await self._ask(f"tool {name}", lambda client: client.call_tool(name, dict(arguments)))

    async def close(self) -> None:
        """End the session and the process. May be called again."""
        self._closing.set()
        if not self._ready.done():
            self._keeper.cancel()
        _, late = await asyncio.wait({self._keeper}, timeout=CLOSE_TIMEOUT_S)
        if late:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=CLOSE_TIMEOUT_S)

    async def _ask(self, what: str, ask: Callable[[mcp.Client], Awaitable[T]]) -> T:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        if not self.is_open:
            raise self._lost(f"is gone; {what} was not requested") from self._failure()
        call = asyncio.ensure_future(ask(self._ready.result()))
        try:
            await asyncio.wait({call, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._lost(f"is gone during {what}") from self._failure()
            return call.result()
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise
            if error.code == CONNECTION_CLOSED:
                self._closing.set()
            raise self._lost(f"failed at {what}: {error.message} (code {error.code})") from error
        except EnvError:
            raise
        except Exception as error:
            self._closing.set()
            raise self._lost(f"failed at {what}: {type(error).__name__}: {error}") from error
        finally:
            call.cancel()

    async def _keep(self) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as self._errors:
            try:
                async with (
                    self._server.transport(self._errors) as transport,
                    Client(transport, read_timeout_seconds=self._server.call_timeout_s, cache=None) as client,
                ):
                    self._ready.set_result(client)
                    await self._closing.wait()
            finally:
                self._said = self._tail()

    def _failure(self) -> BaseException | None:
        done = self._keeper.done() and not self._keeper.cancelled()
        return self._keeper.exception() if done else None

    def _lost(self, how: str) -> EnvError:
        failure = self._failure()
        why = f": {_innermost(failure)}" if failure is not None else ""
        said = self._said if self._keeper.done() else self._tail()
        quoted = f"; the end of its standard error:\n{said}" if said else ""
        return EnvError(f"the MCP server {self._server.place} {how}{why}{quoted}")

    _said = ""

    def _tail(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        return (
            os.pread(self._errors.fileno(), MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
            .decode(errors="replace")
            .strip()
        )


async def _list_tools(client: mcp.Client, *, cursor: str | None) -> mcp_types.ListToolsResult:
    return await client.list_tools(cursor=cursor)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _filled(values: Mapping[str, str]) -> dict[str, str]:
    """Values with `env:NAME` replaced. Raises ConfigError for a variable that is not set."""
    filled = {}
    for key, value in values.items():
        kind, colon, name = str(value).partition(":")
        if kind == "env" and colon:
            if name not in os.environ:
                raise ConfigError(f"{key}: env:{name}, but the environment variable {name} is not set")
            value = os.environ[name]
        filled[key] = str(value)
    return filled


def _require_mcp() -> None:
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of_extra("the mcp package is not installed", "mcp") from error
