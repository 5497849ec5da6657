"""The secrets with which parts of a run know each other: read from the environment, or from files that it names.

Knows no wire. A listener that others can reach demands one; on loopback it may go without.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError

RUN = "AGENTRL_TOKEN"
"""Between learner and orchestrator; and wherever the two below are not set."""
SANDBOX = "AGENTRL_SANDBOX_TOKEN"
ENGINE = "AGENTRL_ENGINE_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Those of one run."""

    run: str
    sandbox: str
    engine: str | None
    """None: engines demand none, and so listen on loopback only."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """What the environment says; where it says nothing the run makes up its own. Raises ConfigError."""
        run = read(RUN, environ) or secrets.token_urlsafe(16)
        return cls(run=run, sandbox=read(SANDBOX, environ) or run, engine=read(ENGINE, environ))


def read(name: str, environ: Mapping[str, str]) -> str | None:
    """The token called `name`: of the variable, of the file that `name`_FILE names, or that of the run.

    Raises ConfigError for a file that cannot be read or is empty.
    """
    if token := environ.get(name):
        return token
    if path := environ.get(f"{name}_FILE"):
        try:
            token = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name}_FILE: cannot read {path}: {error.strerror}") from error
        if not token:
            raise ConfigError(f"{name}_FILE: {path} is empty")
        return token
    return read(RUN, environ) if name != RUN else None


def demand(token: str | None, *, host: str, key: str, name: str) -> None:
    """Raises ConfigError where `key`, set to `host`, lets others in and there is no token to know friends by."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key}: {host} can be reached by others, and there is no token: set {name} (or {name}_FILE, the path of a "
            "file that holds one), or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. Names other than localhost count as reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
