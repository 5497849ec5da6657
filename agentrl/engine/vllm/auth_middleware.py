"""Authentication inside a vLLM server: every route except /health requires the engine's bearer token.

vLLM's own --api-key leaves the routes that change weights open, and those execute what they receive. Stock vLLM loads
this class through its --middleware flag (engine/vllm_command.py). Independent of the routes themselves.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentrl.supervision import secrets

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Callable[[Scope], Awaitable[None]]], Awaitable[None]]
OPEN_PATHS = ("/health",)
REFUSAL = b'{"error": {"message": "wrong or missing bearer token: see AGENTRL_ENGINE_TOKEN"}}'


class BearerAuthMiddleware:
    """ASGI middleware that answers 401 to requests without the token of AGENTRL_ENGINE_TOKEN.

    Raises ConfigError at the start where the environment holds no token.

    Example:
        vllm serve MODEL --middleware agentrl.engine.vllm.auth_middleware.BearerAuthMiddleware
    """

    def __init__(self, app: App) -> None:
        token = secrets.read(secrets.ENGINE, os.environ)
        secrets.require(token, host="", key="engine", name=secrets.ENGINE)
        assert token is not None
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Any, send: Callable[[Scope], Awaitable[None]]) -> None:
        """Pass an allowed request on; answer 401 to any other."""
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and secrets.is_bearer(given[0], self._token)
