"""Inside a vLLM server: lets in only who shows the token.

vLLM's own --api-key leaves open the routes that change weights, and those run what they are told. Handed to stock vLLM
by its --middleware flag (engine/vllm_server.py). Knows no route but the one that says it lives.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentrl.supervision import secrets as tokens

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Callable[[Scope], Awaitable[None]]], Awaitable[None]]
OPEN_PATHS = ("/health",)
REFUSAL = b'{"error": {"message": "wrong or missing bearer token: see AGENTRL_ENGINE_TOKEN"}}'


class TokenGuard:
    """ASGI layer around everything the server answers. Raises ConfigError at the start where there is no token."""

    def __init__(self, app: App) -> None:
        token = tokens.read(tokens.ENGINE, os.environ)
        tokens.demand(token, host="", key="engine", name=tokens.ENGINE)
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Callable[[Scope], Awaitable[None]]) -> None:
        """Pass on what is allowed, answer 401 to the rest."""
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
