"""The secrets by which the parts of a run recognise each other: read from the environment, or from files it names.

A listener that other machines can reach requires a secret; a listener on loopback may go without one.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError

RUN = "AGENTRL_TOKEN"
"""Between learner and orchestrator; also the default of the two below."""
SANDBOX = "AGENTRL_SANDBOX_TOKEN"
ENGINE = "AGENTRL_ENGINE_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The secrets of one run.

    >>> Secrets.from_environment({"AGENTRL_TOKEN": "a", "AGENTRL_ENGINE_TOKEN": "b"})
    Secrets(run='a', sandbox='a', engine='b')
    """

    run: str
    sandbox: str
    engine: str | None
    """None: engines require no secret, and so listen on loopback only."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """The secrets that the environment sets; the run generates its own where none is set. Raises ConfigError."""
        run = read(RUN, environ) or secrets.token_urlsafe(16)
        return cls(run=run, sandbox=read(SANDBOX, environ) or run, engine=read(ENGINE, environ))

    def for_place(self, place: str) -> Self:
        """These, for a run with `place`: engines elsewhere can be reached by others, and require a secret."""
        return self if place == "local" else replace(self, engine=self.engine or self.run)


def read(name: str, environ: Mapping[str, str]) -> str | None:
    """The secret called `name`: the variable's value, the content of the file `name`_FILE, or the secret of the run.

    Raises ConfigError for a file that cannot be read or is empty.
    """
    if secret := environ.get(name):
        return secret
    if path := environ.get(f"{name}_FILE"):
        try:
            secret = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name}_FILE: cannot read {path}: {error.strerror}") from error
        if not secret:
            raise ConfigError(f"{name}_FILE: {path} is empty")
        return secret
    return read(RUN, environ) if name != RUN else None


def require(secret: str | None, *, host: str, key: str, name: str) -> None:
    """Raises ConfigError when other machines can reach `host`, which `key` sets, and there is no secret."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"{key}: {host} can be reached by others, and there is no token: set {name} (or {name}_FILE, the path of a "
            "file that holds one), or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost count as reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_bearer(authorization: str | bytes, secret: str) -> bool:
    """Whether the value of an Authorization header is `Bearer SECRET`; compared in constant time."""
    given = authorization.encode() if isinstance(authorization, str) else authorization
    return hmac.compare_digest(given, f"Bearer {secret}".encode())
