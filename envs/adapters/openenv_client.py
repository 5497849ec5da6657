"""OpenEnv's protocol: one WebSocket is one session. Messages and error codes; independent of Env.

/schema                     the JSON schema of an action
/ws  reset, step, close     -> observation {observation, reward, done}, or error {code, message}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from agentrl.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

MAX_MESSAGE_BYTES = 100 * 2**20
FULL_WAIT_S = 0.25
"""Pause before a full server is asked again. Doubles up to MAX_FULL_WAIT_S."""
MAX_FULL_WAIT_S = 2.0
CLOSE_TIMEOUT_S = 5.0


class ActionRefused(Exception):
    """The server refused the action, which was not played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvServer:
    """The address of a server, and its timeouts.

    Args:
        url: `http://`, `https://`, `ws://` or `wss://`, without `/ws` at the end.
        connect_timeout_s: longest wait for a connection, and for a free session of a full server.
        step_timeout_s: longest wait for an answer.
    """

    url: str
    connect_timeout_s: float = 60.0
    step_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"openenv:{self.url} is not a URL such as openenv:http://127.0.0.1:8000")

    @property
    def http_url(self) -> str:
        """Base URL of its HTTP routes."""
        return self.url.replace("ws", "http", 1).rstrip("/") if self.url.startswith("ws") else self.url.rstrip("/")

    async def action_schema(self) -> dict[str, Any]:
        """JSON schema of its actions. Raises EnvError."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.connect_timeout_s)) as client,
                client.get(f"{self.http_url}/schema") as answer,
            ):
                answer.raise_for_status()
                schema = (await answer.json())["action"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise EnvError(f"no OpenEnv server answers at {self.http_url}/schema: {_reason(error)}") from error
        if not isinstance(schema, dict):
            raise EnvError(f"{self.http_url}/schema describes no action")
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    done: bool


class OpenEnvSession:
    """One session: one environment object on the server, which ends with the connection."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._client: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None

    async def reset(self, data: Mapping[str, Any]) -> Answer:
        """Connect if needed, and start an episode. Waits while the server is full. Raises EnvError."""
        try:
            async with asyncio.timeout(self._server.connect_timeout_s):
                return await self._reset(data)
        except TimeoutError as error:
            late = f"had no free session within {self._server.connect_timeout_s:g} s"
            raise EnvError(f"the OpenEnv server {self._server.url} {late}") from error

    async def step(self, action: Mapping[str, Any]) -> Answer:
        """Play an action. Raises ActionRefused, EnvError."""
        answer = await self._ask("step", action)
        if answer["type"] == "error":
            data = answer.get("data", {})
            if data.get("code") == "VALIDATION_ERROR":
                raise ActionRefused(_refusal(data))
            raise self._failed("step", data)
        return self._read(answer)

    async def close(self) -> None:
        """Send a close message and disconnect. May be called again."""
        socket, client, self._socket, self._client = self._socket, self._client, None, None
        try:
            if socket is not None and not socket.closed:
                # The session ends with the connection in any case.
                with suppress(TimeoutError, aiohttp.ClientError, OSError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await socket.send_str(json.dumps({"type": "close"}))
                        await socket.close()
        finally:
            if client is not None:
                await client.close()

    async def _reset(self, data: Mapping[str, Any]) -> Answer:
        wait_s = FULL_WAIT_S
        while True:
            answer = await self._ask("reset", data)
            if answer["type"] != "error":
                return self._read(answer)
            error = answer.get("data", {})
            if error.get("code") != "CAPACITY_REACHED":
                raise self._failed("reset", error)
            await self.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_FULL_WAIT_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._server.step_timeout_s):
                socket = await self._connected()
                with suppress(aiohttp.ClientConnectionResetError):  # it may have sent a reason before it disconnected
                    await socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await socket.receive_str())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise EnvError(f"the OpenEnv server {self._server.url} is gone during {kind}: {_reason(error)}") from error
        if not isinstance(answer, dict) or answer.get("type") not in ("observation", "error"):
            raise EnvError(f"the OpenEnv server {self._server.url} answers {kind} with {str(answer)[:200]}")
        return answer

    async def _connected(self) -> ClientWebSocketResponse:
        if self._socket is None:
            self._client = aiohttp.ClientSession()
            self._socket = await self._client.ws_connect(
                f"{self._server.http_url}/ws", max_msg_size=MAX_MESSAGE_BYTES, heartbeat=20.0
            )
        return self._socket

    def _read(self, answer: Mapping[str, Any]) -> Answer:
        data = answer.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise EnvError(f"the OpenEnv server {self._server.url} answers without an observation")
        reward = data.get("reward")
        return Answer(
            observation=data["observation"],
            reward=0.0 if reward is None else float(reward),
            done=bool(data.get("done")),
        )

    def _failed(self, what: str, data: Mapping[str, Any]) -> EnvError:
        code, message = data.get("code", "no code"), data.get("message", "no message")
        return EnvError(f"the OpenEnv server {self._server.url} failed at {what}: {message} ({code})")


def _refusal(data: Mapping[str, Any]) -> str:
    """What is wrong with an action, in one sentence."""
    errors = data.get("errors") or ()
    problems = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in errors if isinstance(e, dict)]
    return "; ".join(problems) or str(data.get("message"))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
